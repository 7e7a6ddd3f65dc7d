"""Collectives of rows, trees and objects, handles, groups that are closed, and barriers."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.collectives import by_mpi4jax, engines
from jdistgrad.collectives.default import of_this_world
from jdistgrad.errors import CollectiveError

pytestmark = pytest.mark.world(1, 3)


def rows_of(rank, count, dtype="float32"):
    return jnp.asarray(np.arange(count * 2).reshape(count, 2) + 100 * rank, dtype)


@on_every_worker
def test_ranks_with_different_numbers_of_rows(world, rank, size):
    c = of_this_world()
    for dtype in ("bfloat16", "bool"):
        found = c.gather_rows(rows_of(rank, rank, dtype))
        expected = jnp.concatenate([rows_of(other, other, dtype) for other in range(size)])
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@on_every_worker
def test_blocks_of_all_sizes(world, rank, size):
    c = of_this_world()
    splits = [(rank + other) % size for other in range(size)]
    mine = rows_of(rank, sum(splits))
    sent = {
        other: np.split(
            rows_of(other, sum((other + k) % size for k in range(size))),
            np.cumsum([(other + k) % size for k in range(size)])[:-1],
        )[rank]
        for other in range(size)
    }
    np.testing.assert_array_equal(c.alltoall(mine, splits), np.concatenate([sent[other] for other in range(size)]))
    blocks = {dtype: rows_of(rank, 2 * size, dtype) for dtype in ("float32", "bfloat16", "int8", "bool")}
    for run in (c.alltoall, jax.jit(c.alltoall)):
        for dtype, found in run(blocks).items():
            sent = [rows_of(other, 2 * size, dtype)[2 * rank : 2 * rank + 2] for other in range(size)]
            np.testing.assert_array_equal(found, jnp.concatenate(sent))


@on_every_worker
def test_trees_go_through_every_operation(world, rank, size):
    c, tree = of_this_world(), {"a": rows_of(rank, size), "b": [jnp.float32(rank + 1), None]}
    ranks = range(size)
    assert_close(c.allreduce(tree, "mean")["b"][0], np.float32(np.mean([r + 1 for r in ranks])))
    assert_close(c.allreduce(tree, "prod")["b"][0], np.float32(np.prod([r + 1.0 for r in ranks])))
    assert_close(c.broadcast(tree, size - 1), {"a": rows_of(size - 1, size), "b": [jnp.float32(size), None]})
    assert c.allgather(tree)["a"].shape == (size, size, 2)
    for operation in (c.alltoall, c.reduce_scatter, c.shift, c.gather_rows):
        assert operation({"a": tree["a"]}).keys() == {"a"}


@on_every_worker
def test_larger_than_a_chunk(big_world, monkeypatch, rank, size):
    # Smaller limits test the path for arrays larger than MPI can count.
    for module in (engines, by_mpi4jax):
        monkeypatch.setattr(module, "CHUNK", 1000)
    c, last = of_this_world(), size - 1

    def every_operation(x):
        return c.allreduce(x), c.broadcast(x, last), c.allgather(x), c.alltoall(x), c.shift(x)

    numbers = np.stack([np.arange(size * 777).reshape(size, 777) % 50 + r for r in range(size)])
    expected = numbers.sum(0), numbers[last], numbers, numbers[:, rank], numbers[rank - 1]
    mine = {dtype: jnp.asarray(numbers[rank], dtype) for dtype in ("float32", "bfloat16")}
    for run in (every_operation, jax.jit(every_operation)):
        for found, each in zip(run(mine), expected, strict=True):
            for one in found.values():
                np.testing.assert_array_equal(one.astype("float32"), each)


@on_every_worker
def test_what_ranks_change_in_objects_afterwards_is_their_own(world, rank, size):
    c, mine = of_this_world(), {"rows": [rank], "x": np.full(2, rank)}
    gathered, sent = c.allgather_object(mine), c.broadcast_object(mine, root=size - 1)
    for one in (mine, *gathered, sent):
        c.barrier()
        one["rows"].append(-1)
        one["x"][:] = -1
    again = c.allgather_object(mine)
    c.barrier()
    assert [one["rows"] for one in gathered] == [[other, -1] for other in range(size)]
    assert (mine["rows"], sent["rows"]) == ([rank, -1], [size - 1, -1])
    assert [one["rows"] for one in again] == [[other, -1] for other in range(size)]


@on_every_worker
def test_objects_with_large_and_small_arrays(world, rank, size):
    def mine(rank):
        return {"large": np.full((rank + 1, 20_000), rank, np.float32).T, "small": np.arange(rank), "none": np.zeros(0)}

    for other, found in enumerate(of_this_world().allgather_object(mine(rank))):
        for name, array in mine(other).items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].flags.writeable


@on_every_worker
def test_numbers_of_rows_that_cannot_be(world, rank, size):
    c = of_this_world()
    for tree in ({"a": jnp.ones((2, 1)), "b": jnp.ones((3, 1))}, jnp.ones(())):
        with pytest.raises(ValueError, match="equally many rows"):
            c.gather_rows(tree)
    for counts in ([2] * (size + 1), [3] * size, [2] * (size - 1)):
        with pytest.raises(ValueError, match=rf"gather_rows: counts=.* for {size} ranks, of which this has 2 rows"):
            c.gather_rows(jnp.ones((2, 1)), counts)


@on_every_worker
def test_handles_finish_in_any_order_of_asking(world, rank, size):
    c = of_this_world()
    handles = [c.start(lambda c, k=k: c.allreduce(jnp.float32(rank + k))) for k in range(5)]
    beside = c.allreduce(jnp.float32(1))  # meanwhile, on this thread
    totals = [float(handle.result(20)) for handle in reversed(handles)]
    assert totals == [sum(range(size)) + size * k for k in reversed(range(5))]
    assert beside == size
    failing = c.start(lambda c: c.allreduce(jnp.ones(3), "median"))
    assert isinstance(failing.exception(20), ValueError)
    c.close()


@on_every_worker
def test_what_is_started_computes_in_the_precision_of_who_starts_it(big_world, rank, size):
    c = of_this_world()
    with jax.enable_x64(True):
        third, large = c.start(lambda c: c.allreduce((jnp.asarray(1 / 3), np.int64(2**40) + rank), "max")).result()
    assert (third.dtype, large.dtype) == (jnp.float64, jnp.int64)
    assert (float(third), int(large)) == (1 / 3, 2**40 + size - 1)
    assert c.start(lambda c: jnp.ones(1)).result().dtype == jnp.float32


@on_every_worker
def test_a_closed_group_refuses_use_and_others_go_on(world, rank, size):
    everybody = of_this_world()
    for _ in range(3):
        with of_this_world() as c:
            assert c.allreduce(jnp.float32(1)) == size
            assert jax.jit(c.allreduce)(jnp.float32(1)) == size
        c.close()  # again
        for use in (lambda: c.allreduce(jnp.float32(1)), lambda: c.start(lambda c: c.barrier())):
            with pytest.raises(CollectiveError, match=r"has been closed\. Create new collectives"):
                use()
    assert everybody.allreduce(jnp.float32(1)) == size


@on_every_worker
def test_metrics_of_all_ranks(world, rank, size):
    dp = jd.DataParallel()
    found = dp.mean({"loss": float(rank), "correct": rank, "hits": jnp.array([rank, 1]), "flag": rank == 0})
    mean, each = sum(range(size)) / size, jax.tree.map(np.float32, found)
    assert_close(each["loss"], np.float32(mean))
    assert_close(each["correct"], np.float32(mean))
    assert_close(each["hits"], np.float32([mean, 1]))
    assert_close(each["flag"], np.float32(1 / size))


@on_every_worker
def test_nobody_passes_before_all_have_come(world, rank, size):
    for turn in range(3):
        if rank == turn % size:
            time.sleep(0.05)
        before = time.time()
        jd.barrier()
        arrivals = of_this_world().gather_objects((before, time.time()))
        assert max(came for came, _ in arrivals) <= min(left for _, left in arrivals)
