"""Legal but rare inputs: widths that differ by rank, small dtypes, changed settings, arrays that are written to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.worlds import on_every_worker

from jdistgrad.collectives.default import of_this_world
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import CollectiveError, DisagreementError, LeafError


@on_every_worker
def test_arrays_of_numpy_keep_their_width(big_world, rank, size):
    found = DataParallel().broadcast({"n": np.full(2, 2**40 + rank), "x": np.full(2, 1 / 3 + rank)})
    np.testing.assert_array_equal(found["n"], np.full(2, 2**40))
    np.testing.assert_array_equal(found["x"], np.full(2, 1 / 3))


@on_every_worker
def test_numbers_of_python_keep_their_digits(big_world, rank, size):
    numbers = {"rate": 0.1, "time": 1.7e9 + 1 / 3, "large": 3e38, "z": 0.1j, "zero": -0.0, "n": 7, "on": True}
    mine = numbers if rank == 0 else {name: type(one)(rank) for name, one in numbers.items()}
    found = DataParallel().broadcast(mine)
    assert str(found) == str(dict(sorted(numbers.items())))
    arrays = {"jax": jnp.float32(0.1 + rank), "numpy": np.float32(0.1 + rank), "one": np.full((), 0.1 + rank)}
    found = DataParallel().broadcast(arrays)
    assert_close(found, {"jax": jnp.float32(0.1), "numpy": jnp.float32(0.1), "one": np.full((), 0.1)}, rtol=0, atol=0)


@on_every_worker
def test_a_broadcast_binds_arrays_to_a_device_only_where_they_are_bound(big_world, rank, size):
    free = jnp.arange(3.0) + rank
    found = DataParallel().broadcast({"bound": jax.device_put(free, jax.local_devices()[-1]), "free": free})
    assert (found["free"].committed, found["bound"].committed) == (False, True)
    assert found["bound"].devices() == {jax.local_devices()[-1]}


@on_every_worker
def test_bits_that_compare_equal_are_told_apart(big_world, rank, size):
    dp = DataParallel()
    dp.verify([np.nan, jnp.array([np.nan, -0.0])])
    with pytest.raises(DisagreementError):
        dp.verify({"w": jnp.array([1.0, -0.0 if rank == 1 else 0.0])})
    with pytest.raises(DisagreementError):
        dp.verify({"rate": 0.1000000001 if rank == 1 else 0.1})  # Python's, equal in float32


@pytest.mark.parametrize("number", [2**31 + 5, np.int64(2**40)], ids=["Python", "NumPy"])
@on_every_worker
def test_integers_that_do_not_fit(big_world, number, rank, size):
    with pytest.raises(OverflowError):
        DataParallel().broadcast({"n": number})


@pytest.mark.parametrize("name", ["allreduce", "broadcast", "allgather", "shift", "reduce_scatter"])
@on_every_worker
def test_integers_of_numpy_that_collectives_would_wrap_around(world, name, rank, size):
    collective = getattr(of_this_world(), name)
    with pytest.raises(OverflowError):
        collective(np.full(size, 2**40))
    np.testing.assert_array_equal(collective(np.full(size, rank)), collective(jnp.full(size, rank)))


@on_every_worker
def test_means_of_large_integers(world, rank, size):
    found = DataParallel().mean({"tokens": np.int64(3_000_000_000), "rows": np.array([2**40, 1]), "bytes": 2**35})
    assert_close(found, {"tokens": np.float32(3e9), "rows": np.float32([2**40, 1]), "bytes": np.float32(2**35)})


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [jnp.int2, jnp.uint8, jnp.int32])
@on_every_worker
def test_means_whose_sums_do_not_fit(world, dtype, compiled, rank, size):
    most, all_ = jnp.iinfo(dtype).max, of_this_world()
    found = compiled(lambda x: all_.allreduce(x, "mean"))(jnp.full(2, most - rank % 2, dtype))
    expected = np.mean([float(most) - each % 2 for each in range(size)])
    np.testing.assert_allclose(found, np.full(2, expected, np.float32))


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn])
@on_every_worker
def test_means_of_small_floats_whose_sums_do_not_fit(big_world, dtype, compiled, rank, size):
    most, all_ = float(jnp.finfo(dtype).max), of_this_world()
    found = compiled(lambda x: all_.allreduce(x, "mean"))(jnp.asarray([most, 0.5 * rank], dtype))
    np.testing.assert_array_equal(found, np.asarray([most, (size - 1) / 4], dtype))
    assert found.dtype == dtype


KEYS_GIVEN_TO = {
    "allreduce": lambda dp, keys: dp.collectives.allreduce(keys),
    "gather_rows": lambda dp, keys: dp.collectives.gather_rows(keys),
    "shift": lambda dp, keys: dp.collectives.shift(keys),
    "mean": lambda dp, keys: dp.mean({"key": keys}),
}


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", KEYS_GIVEN_TO)
@on_every_worker
def test_random_keys_are_refused_where_only_numbers_will_do(big_world, name, compiled, rank, size):
    dp, keys = DataParallel(), jax.random.split(jax.random.key(rank), 2)
    with pytest.raises(LeafError):
        compiled(functools.partial(KEYS_GIVEN_TO[name], dp))(keys)
    np.testing.assert_array_equal(*map(jax.random.key_data, (dp.broadcast(keys), jax.random.split(jax.random.key(0)))))


@on_every_worker
def test_numbers_smaller_than_a_byte(big_world, rank, size):
    mine = jnp.asarray(np.arange(37) % 2 * 2, jnp.float4_e2m1fn)
    for _ in range(3):
        found = DataParallel().average([mine, jnp.ones(3) * rank])
    expected = np.zeros(37, np.float32)
    for _ in range(size):  # this dtype rounds the sum after each rank
        expected = (expected + (np.arange(37) % 2 * 2 / size).astype(mine.dtype).astype(np.float32)).astype(mine.dtype)
        expected = expected.astype(np.float32)
    np.testing.assert_allclose(np.asarray(found[0], np.float32), expected, atol=0.5)
    np.testing.assert_array_equal(np.asarray(mine, np.float32), np.arange(37) % 2 * 2)


@on_every_worker
def test_precision_that_is_switched_on_later(big_world, rank, size):
    dp, third = DataParallel(), np.full(3, rank + 1 / 3)
    step = dp.value_and_grad(lambda w, x: jnp.sum(w.astype(float) * x.astype(float)) / 3)
    narrow = jnp.ones(3, jnp.float32)
    before = dp.average(third), step(jnp.ones(3), third)[1]
    assert step(narrow, narrow)[0].dtype == jnp.float32
    with jax.enable_x64(True):
        after, (value, _) = dp.average(third), step(jnp.ones(3), third)
        assert step(narrow, narrow)[0].dtype == jnp.float64
    assert (before[0].dtype, after.dtype, value.dtype) == (jnp.float32, jnp.float64, jnp.float64)
    np.testing.assert_allclose(after, (size - 1) / 2 + 1 / 3, rtol=1e-14)
    np.testing.assert_allclose(value, rank + 1 / 3, rtol=1e-14)


@pytest.mark.parametrize("kind", ["step", "program"])
@on_every_worker
def test_options_of_jax_that_are_set_later(big_world, kind, rank, size):
    def drawn():
        return jax.random.uniform(jax.random.key(3), (2,))

    def loss(w):
        return jnp.sum(w * drawn())

    dp, w = DataParallel(), jnp.ones(2)
    step = dp.value_and_grad(loss) if kind == "step" else dp.jit(dp.value_and_grad(loss))
    for partitionable in (True, False, True):
        with jax.threefry_partitionable(partitionable):
            assert_close(step(w)[1], drawn())


@pytest.mark.parametrize(
    ("wrap", "dtype"), [(lambda f: f, "float32"), (jax.jit, "bfloat16")], ids=["called", "compiled"]
)
@on_every_worker
def test_extremes_with_nan_on_any_rank(big_world, wrap, dtype, rank, size):
    c = of_this_world()
    for holder in range(size):
        mine = jnp.asarray([np.nan if rank == holder else rank, rank], dtype)
        for op, extreme in (("max", size - 1), ("min", 0)):
            found = wrap(lambda x, op=op: c.allreduce(x, op))(mine)
            assert np.isnan(found[0])
            assert found[1] == extreme


@on_every_worker
def test_without_compilation_inputs_stay_as_they_are(big_world, rank, size):
    @jax.custom_vjp
    def scaled(w, x):
        return jnp.sum(w * x)

    scaled.defvjp(lambda w, x: (scaled(w, x), x), lambda x, g: (jax.lax.stop_gradient(x), x))
    x = jnp.arange(4.0) + rank
    with jax.disable_jit():
        _, gradient = DataParallel().value_and_grad(scaled)(jnp.ones(4), x)
    np.testing.assert_array_equal(x, np.arange(4.0) + rank)
    np.testing.assert_allclose(gradient, np.arange(4) + (size - 1) / 2, rtol=1e-6)


@on_every_worker
def test_what_the_loss_closes_over_is_as_it_was_when_traced(big_world, rank, size):
    scale = np.ones(3, np.float32)
    step = DataParallel().value_and_grad(lambda w: jnp.sum(w * scale))
    step(jnp.ones(3))
    scale *= 10
    assert float(step(jnp.ones(3))[0]) == 3


@pytest.mark.one_process
@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices: the local run has them, simulated")
@on_every_worker
def test_a_reduce_scatter_of_an_array_on_as_many_devices_as_there_are_workers(big_world, rank, size):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[4 : 4 + size]), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    rows = jnp.arange(2.0 * size).reshape(size, 2)
    found = of_this_world().reduce_scatter(jax.device_put(rows + rank, split))
    np.testing.assert_array_equal(found, [size * rows[rank] + sum(range(size))])


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices: the local run has them, simulated")
@on_every_worker
def test_programs_on_several_devices_have_no_collectives(big_world, rank, size):
    mesh, rows = jax.make_mesh((2,), ("x",), devices=jax.local_devices()[4:6]), jax.sharding.PartitionSpec("x")
    split, total = jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(mesh, rows)), of_this_world().allreduce
    for program in (total, jax.shard_map(total, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)):
        with pytest.raises((CollectiveError, ValueError), match=r"on 2 devices|more than 1 device"):  # JAX's: mpi4jax
            jax.block_until_ready(jax.jit(program)(split))
    np.testing.assert_array_equal(total(jax.jit(jnp.sin)(split)), size * jnp.sin(split))
