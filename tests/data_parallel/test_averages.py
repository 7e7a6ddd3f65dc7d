"""Averages of trees from Python: inputs stay unchanged, and results are on the devices of the inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.collectives.default import of_this_world
from jdistgrad.collectives.world import has_room
from jdistgrad.data_parallel.parallel import DataParallel


@pytest.mark.parametrize("cap", [None, 1e-5], ids=["one bucket", "small buckets"])
@on_every_worker
def test_what_is_averaged_stays_as_it_is(big_world, cap, rank, size):
    dp, mine = DataParallel(bucket_cap_mb=cap), {"w": jnp.arange(5.0) + rank, "b": jnp.full((), 1.0 + rank)}
    found = [dp.average(mine) for _ in range(2)]
    np.testing.assert_array_equal(mine["w"], np.arange(5) + rank)
    for one in found:
        np.testing.assert_allclose(one["w"], np.arange(5) + (size - 1) / 2, rtol=1e-6)
        np.testing.assert_allclose(one["b"], (size + 1) / 2, rtol=1e-6)


@on_every_worker
def test_averages_of_equal_leaves_are_arrays_of_their_own(big_world, rank, size):
    # Averages are written leaf by leaf: if leaves shared one array of zeros, all would hold the last leaf's numbers.
    found = DataParallel().average([jnp.full(3, float(k)) for k in range(5)])
    assert [float(one[0]) for one in found] == list(range(5))
    assert len({one.unsafe_buffer_pointer() for one in found}) == 5


@pytest.mark.host_memory
@on_every_worker
def test_averages_are_weakly_typed_where_the_gradients_are(big_world, rank, size):
    found = DataParallel().average([jnp.full(3, 0.5), jnp.full(3, 0.5, jnp.float32), 0.5])
    assert [one.weak_type for one in found] == [True, False, True]


@pytest.mark.host_memory  # XLA adds over devices in another order than host memory, where jax.jit adds
@on_every_worker
def test_a_compiled_average_has_the_bits_of_one_from_python(big_world, rank, size):
    dp, mine = DataParallel(), jnp.asarray(np.random.default_rng(rank).normal(size=1001), "float32")
    average, mean = dp.average, lambda x: dp.collectives.allreduce(x, "mean")
    for function in (average, mean, dp.value_and_grad(lambda x: jnp.sum(x * x / 2))):
        for one, other in zip(*(jax.tree.leaves(run(mine)) for run in (function, jax.jit(function))), strict=True):
            np.testing.assert_array_equal(one, other, strict=True)
    # The sum is transposed to itself, so these divide on its other side.
    np.testing.assert_array_equal(jax.linear_transpose(jax.jit(average), mine)(mine)[0], mean(mine))
    np.testing.assert_array_equal(jax.vjp(jax.jit(mean), mine)[1](mine)[0], average(mine))


@pytest.mark.one_process
@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices: the local run has them, simulated")
@on_every_worker
def test_leaves_that_lie_on_several_devices_at_once(big_world, rank, size):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[4:6]), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    mine = {"split": jax.device_put(jnp.arange(4.0) + rank, split), "whole": jnp.arange(3.0) + rank}
    found = DataParallel().average(mine)
    assert found["split"].sharding == split
    np.testing.assert_allclose(found["split"], np.arange(4) + (size - 1) / 2, rtol=1e-6)
    np.testing.assert_allclose(found["whole"], np.arange(3) + (size - 1) / 2, rtol=1e-6)


@pytest.mark.parametrize("kind", [np.float64, float], ids=["NumPy", "Python"])
@on_every_worker
def test_leaves_that_are_no_arrays_of_jax(world, kind, rank, size):
    found = DataParallel().average({"w": kind(1.0 + rank)})["w"]
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, (size + 1) / 2, rtol=1e-6)


@pytest.mark.parametrize("room", [True, False])
@on_every_worker
def test_overlap_is_the_default_where_there_is_room(world, room, rank, size):
    c = of_this_world()
    c.has_room = room
    assert DataParallel(c).overlap is room
    assert DataParallel(c, overlap=not room).overlap is not room


def test_where_there_is_room_beside_the_computation():
    assert not has_room([{0, 1}, {0, 1}], 2)  # two ranks on two cores
    assert not has_room([{0}, {1}, {2}], 3)  # each rank is bound to its own core
    assert has_room([{0, 1}, {2, 3}], 2)
    assert has_room([{0}, {1}], 4)  # two ranks are on another machine: there is waiting time to use


@on_every_worker
def test_a_group_by_names_and_infos(big_world, rank, size):
    if rank:
        others = ["worker1", *(jd.worker_info(f"worker{one}") for one in range(2, size))]
        group = jd.collectives.of_this_world(others)
        assert (group.rank, group.size) == (rank - 1, size - 1)
        np.testing.assert_array_equal(group.allreduce(jnp.float32(rank)), sum(range(1, size)))
