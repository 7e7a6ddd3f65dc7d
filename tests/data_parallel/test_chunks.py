"""Buckets larger than a chunk, and dtypes that MPI lacks or knows under another name."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.worlds import on_every_worker

from jdistgrad.collectives import engines
from jdistgrad.collectives.default import of_this_world
from jdistgrad.data_parallel import buckets as bucket
from jdistgrad.data_parallel.parallel import DataParallel

SIZES = [1, 63, 64, 65, 0, 129, 7, 64]  # chunks of 64 elements


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(bucket, "CHUNK", 64 * 4)


def leaves(rank):
    return [jnp.asarray(np.arange(size, dtype=np.float32) * (1 + rank) + k) for k, size in enumerate(SIZES)]


@pytest.mark.parametrize("cap", [None, 3e-4], ids=str)
@on_every_worker
def test_leaves_around_the_ends_of_chunks(small_chunks, big_world, cap, rank, size):
    found = DataParallel(bucket_cap_mb=cap).average(leaves(rank))
    everybody = [leaves(other) for other in range(size)]
    for mine, *theirs in zip(found, *everybody, strict=True):
        np.testing.assert_allclose(mine, sum(theirs) / size, rtol=1e-6)


@on_every_worker
def test_who_has_joined_sends_zeros_chunk_by_chunk(small_chunks, big_world, rank, size):
    dp = DataParallel()
    with dp.join():
        for _ in range(rank + 1):
            found = dp.average(leaves(0))
    if rank == size - 1:  # the last step was this rank's alone
        for mine, own in zip(found, leaves(0), strict=True):
            np.testing.assert_allclose(mine, own / size, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_every_worker
def test_blocks_that_are_exchanged_and_summed_little_by_little(monkeypatch, big_world, dtype, rank, size):
    monkeypatch.setattr(engines, "SUMMED", 256)
    table = jnp.arange(size * 50 * 3).reshape(size * 50, 3) % 8
    found = of_this_world().reduce_scatter((table * (1 + rank)).astype(dtype))
    np.testing.assert_array_equal(found, table[rank * 50 : (rank + 1) * 50] * sum(range(1, size + 1)))


@pytest.mark.parametrize("dtype", ["float64", "complex128", "uint64"])
@on_every_worker
def test_types_of_eight_bytes_and_more(big_world, dtype, rank, size):
    with jax.enable_x64(True):
        all_, x = of_this_world(), jnp.arange(5).astype(dtype) + rank
        assert x.dtype == dtype
        total = all_.allreduce(x)
        assert total.dtype == dtype
        np.testing.assert_array_equal(total, np.arange(5) * size + sum(range(size)))
        np.testing.assert_array_equal(
            all_.allreduce(x, "max") if "complex" not in dtype else x,
            x + (size - 1 - rank) * ("complex" not in dtype),
        )
        np.testing.assert_array_equal(all_.broadcast(x, 1), np.arange(5) + 1)
        np.testing.assert_array_equal(all_.allgather(x)[1], np.arange(5) + 1)
        if dtype in ("float64", "complex128"):
            found = DataParallel().average({"w": x})["w"]
            assert found.dtype == dtype
            np.testing.assert_allclose(found, np.arange(5) + (size - 1) / 2)


@pytest.mark.parametrize("dtype", ["float8_e4m3b11fnuz", "float8_e4m3fn"])
@on_every_worker
def test_narrow_floats_whose_letters_mean_other_types_to_mpi(big_world, dtype, rank, size):
    total = of_this_world().allreduce(jnp.asarray(np.full(8, 1.0 + rank), getattr(ml_dtypes, dtype)))
    np.testing.assert_array_equal(np.asarray(total, np.float32), np.full(8, sum(range(1, size + 1))))


@on_every_worker
def test_arrays_in_the_order_of_fortran_are_broadcast(big_world, rank, size):
    own = np.asfortranarray(np.arange(6.0, dtype=np.float32).reshape(2, 3) + rank)
    found = DataParallel().broadcast({"w": own}, root=1)["w"]
    np.testing.assert_array_equal(found, np.arange(6).reshape(2, 3) + 1)
