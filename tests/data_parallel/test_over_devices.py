"""Steps and functions compiled into one program over the devices of all ranks (`make test-devices-3`)."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.models import batch, loss, parameters, serial
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.collectives import Devices, Mesh, of_this_world
from jdistgrad.collectives.launches import launches
from jdistgrad.data_parallel.on_device import OnDevice
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import CollectiveError, DisagreementError, LeafError

pytestmark = pytest.mark.over_devices


@on_every_worker
def test_gradients_stay_on_the_rank_s_device(world, rank, size):
    dp, params = DataParallel(bucket_cap_mb=2e-4), parameters()
    assert isinstance(dp.collectives, Devices)
    value, gradients = dp.value_and_grad(loss)(params, batch(rank))
    assert_close(gradients, serial(loss, params, [batch(one) for one in range(size)])[1])
    assert_close(value, loss(params, batch(rank)))
    for leaf in jax.tree.leaves((value, gradients)):
        assert leaf.devices() == {jax.local_devices()[0]}
        assert leaf.is_fully_addressable
    assert len(dp.statistics().bucket_sizes) == 3


@on_every_worker
def test_ranks_with_unequal_batches(big_world, caplog, rank, size):
    # Each rank's backward pass is another program then; only the averages span the devices.
    caplog.set_level(logging.WARNING, "jdistgrad.data_parallel")
    dp, params = DataParallel(), parameters()
    step = dp.value_and_grad(loss)
    for _ in range(2):
        _, gradients = step(params, batch(rank, rows=rank + 2))
        assert_close(gradients, serial(loss, params, [batch(one, rows=one + 2) for one in range(size)])[1])
    _, gradients = step(params, batch(rank))  # and equal ones again
    assert_close(gradients, serial(loss, params, [batch(one) for one in range(size)])[1])
    assert [record.getMessage()[:22] for record in caplog.records] == ["the ranks' steps diffe"]


@on_every_worker
def test_hooks_keep_their_states_from_batch_to_batch(big_world, rank, size):
    # int8's error feedback: with and without equal batches, the sum of what was sent follows the sum of the gradients.
    dp, plain = DataParallel(hook=jd.hooks.int8()), DataParallel()
    params = {"w": jnp.linspace(-1, 1, 50).reshape(10, 5)}
    step = dp.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2))
    exact = plain.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2))
    sent = wanted = 0.0
    for number in range(6):
        x = np.random.default_rng([number, rank]).normal(size=(3 + rank * (number % 2), 10)).astype("float32")
        sent += np.asarray(step(params, x)[1]["w"])
        wanted += np.asarray(exact(params, x)[1]["w"])
    np.testing.assert_allclose(sent, wanted, atol=0.02)


@on_every_worker
def test_arrays_that_the_loss_closes_over_differ_from_rank_to_rank(big_world, rank, size):
    factor, table = jnp.float32(rank), np.full(2, float(rank), np.float32)
    step = DataParallel().value_and_grad(lambda p: (p * factor + p * table).sum())
    np.testing.assert_allclose(step(jnp.ones(2))[1], np.full(2, 2.0), rtol=1e-6)
    table[:] = 100
    np.testing.assert_allclose(step(jnp.ones(2))[1], np.full(2, 2.0), rtol=1e-6)


@on_every_worker
def test_arguments_of_every_kind(big_world, rank, size):
    def noisy(p, key, flag, count, rows, nothing):
        noise = jax.random.normal(key, p["w"].shape) * flag
        return ((p["w"] + noise) * rows).sum() * count + p["s"] * nothing.sum(), (key, nothing)

    step = DataParallel().value_and_grad(noisy, has_aux=True)
    params = {"w": jnp.ones(3), "s": jnp.float32(2)}
    args = jax.random.key(rank), True, 2, np.full(3, float(rank), np.float32), np.zeros((0, 2), np.float32)
    (value, (key, nothing)), gradients = step(params, *args)
    expected, _ = noisy(params, *args)
    assert_close(value, jnp.float32(expected[0]) if not isinstance(expected, jax.Array) else expected)
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(args[0]))
    assert jnp.shape(nothing) == (0, 2)
    np.testing.assert_allclose(gradients["w"], np.full(3, 2.0), rtol=1e-6)
    assert gradients["s"] == 0


@on_every_worker
def test_the_watch_of_programs_passes_over_random_keys(big_world, rank, size):
    what, engine, inputs = "a program of a key", of_this_world().engine, [jax.random.key(0), jnp.ones(2)]
    launch = launches.begin(what, engine.block(what, may_leave=True), inputs, 60.0)
    assert not launch.overdue()
    launches.give_up(launch)


@on_every_worker
def test_a_whole_training_step_in_one_program(world, rank, size):
    dp, tx, params = DataParallel(bucket_cap_mb=2e-4), optax.sgd(0.1, momentum=0.9), parameters()
    by_all = of_this_world()

    def whole(params, state, x):
        value, gradients = dp.value_and_grad(loss)(params, x)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, by_all.allreduce(value, "mean"), dp.collectives.rank * 1

    step, state = dp.jit(whole, donate_argnums=(0, 1)), tx.init(params)
    expected, serial_state = parameters(), tx.init(params)
    batches = [batch(one) for one in range(size)]
    for _ in range(3):
        mean, gradients = serial(loss, expected, batches)
        updates, serial_state = tx.update(gradients, serial_state, expected)
        expected = optax.apply_updates(expected, updates)
        before = params
        params, state, value, who = step(params, state, batch(rank))
        assert_close(value, mean, rtol=1e-3)
        assert who == rank
    assert_close(params, expected, rtol=1e-3, atol=1e-3)
    assert before["dense"][0]["w"].is_deleted()
    dp.verify(params)


@on_every_worker
def test_the_state_of_average_gradients_in_one_program(big_world, rank, size):
    tx = optax.chain(jd.average_gradients(hook=jd.hooks.int8()), jd.shard_state(optax.adam(0.1)))
    params = {"w": jnp.linspace(-1, 1, 7), "b": jnp.float32(1)}
    gradients = {"w": jnp.linspace(0, 1, 7) * (rank + 1), "b": jnp.float32(rank)}
    found = {}
    for name, jit in (("called", lambda f: f), ("compiled", of_this_world().jit)):
        state, current, update = tx.init(params), params, jit(tx.update)
        for _ in range(3):
            updates, state = update(gradients, state, current)
            current = optax.apply_updates(current, updates)
        found[name] = current
    assert_close(found["compiled"], found["called"], rtol=1e-5)


@on_every_worker
def test_functions_that_differ_are_told(big_world, rank, size):
    step = of_this_world().jit(lambda x: x * (2 if rank == 1 else 3))
    said = r"rank 0 does <lambda> of float32\[2\] over all devices \(program .*\), rank 1 does <lambda>"
    with pytest.raises(DisagreementError, match=said):
        step(jnp.ones(2))


@on_every_worker
def test_an_array_that_is_not_the_rank_s_own(big_world, rank, size):
    everybody = of_this_world()
    sharding = jax.sharding.NamedSharding(
        everybody.span.mesh, jax.sharding.PartitionSpec(everybody.span.mesh.axis_names)
    )
    spread = jax.make_array_from_process_local_data(sharding, np.ones((1, 2), np.float32))
    with pytest.raises(LeafError, match=r"float32\[3, 2\] is spread over the devices of several processes"):
        everybody.jit(lambda x: x)(spread)
    np.testing.assert_array_equal(everybody.allreduce(jnp.ones(2)), np.full(2, size))


@on_every_worker
def test_arrays_on_a_mesh_of_one_device_are_refused(big_world, rank, size):
    mesh = jax.make_mesh((1,), ("own",), devices=jax.local_devices()[:1])
    x = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.sharding.PartitionSpec("own")))
    dp = DataParallel()
    for use in (dp.average, dp.value_and_grad(jnp.sum), dp.collectives.allreduce, dp.collectives.jit(jnp.sum)):
        with pytest.raises(LeafError, match=r"lies on .*Use jax\.device_put\(x, jax\.local_devices\(\)\[0\]\)"):
            use(x)
    np.testing.assert_allclose(dp.collectives.allreduce(jnp.ones(2)), np.full(2, size))


@on_every_worker
def test_other_programs_of_the_rank_alone_reduce_in_host_memory(big_world, rank, size):
    dp = DataParallel()
    step = jax.jit(lambda p: dp.value_and_grad(lambda p: (p * (rank + 1)).sum())(p)[1])
    np.testing.assert_allclose(step(jnp.ones(2)), np.full(2, 2.0), rtol=1e-6)


@on_every_worker
def test_joined_ranks_go_along_in_host_memory(big_world, rank, size):
    dp, taken = DataParallel(), []
    step = dp.value_and_grad(lambda p, x: (p * x).sum())
    with dp.join(divide_by_initial_world_size=False) as join:
        for number in range(rank + 1):
            taken.append(step(jnp.ones(2), jnp.full(2, float(rank)))[1])
            assert number < size
        join.finish(jnp.ones(1))
    np.testing.assert_allclose(taken[-1], np.full(2, (rank + size - 1) / 2), rtol=1e-6)
    np.testing.assert_allclose(step(jnp.ones(2), jnp.full(2, float(rank)))[1], np.ones(2), rtol=1e-6)


@on_every_worker
def test_mesh_and_devices_gather_alike(big_world, rank, size):
    everybody = of_this_world()
    rows = everybody.jit(lambda x: (everybody.gather_same(x), everybody.reduce_scatter(jnp.ones(6) * x)))(
        jnp.float32(rank)
    )
    np.testing.assert_array_equal(rows[0], np.arange(3))
    np.testing.assert_array_equal(rows[1], np.full(2, 3.0))
    with pytest.raises(CollectiveError):
        Mesh("elsewhere").allreduce(jnp.ones(2))


@on_every_worker
def test_groups_of_one_size_are_told_apart(big_world, rank, size):
    # JAX keeps the traces of jitted functions by the names of axes: those of two groups must differ.
    whole = of_this_world()
    if rank != 2:
        with of_this_world([0, 1]) as first:
            inner = jax.jit(lambda x: first.allreduce(x))
            assert first.jit(inner)(jnp.float32(rank + 1)) == 3
    if rank != 0:
        with of_this_world([1, 2]) as second:
            assert second.span.axis != whole.span.axis
            assert second.jit(lambda x: second.allreduce(x))(jnp.float32(rank)) == 3


@on_every_worker
def test_a_loss_with_collectives_is_one_program(big_world, monkeypatch, rank, size):
    dp = DataParallel()
    monkeypatch.setattr(OnDevice, "_in_two", lambda *_: pytest.fail("in two programs"))
    step = dp.value_and_grad(lambda p, x: (p * (x - dp.collectives.allreduce(x, "mean"))).sum())
    np.testing.assert_allclose(step(jnp.ones(2), jnp.full(2, float(rank)))[1], np.zeros(2), atol=1e-6)


@on_every_worker
def test_a_program_that_no_rank_can_compile_is_an_ordinary_error(big_world, rank, size):
    everybody = of_this_world()
    call = jax.ffi.ffi_call("nobody_has_registered_this", jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(Exception, match="nobody_has_registered_this"):
        everybody.jit(lambda x: call(x))(jnp.ones(3))
    assert everybody.allreduce(1) == size
