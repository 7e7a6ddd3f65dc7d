"""Parameters that no rank's loss depends on: found in each step, and not changed by optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.worlds import on_every_worker

from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import NonFiniteError
from jdistgrad.optim.averaging import average_gradients, keep_unused
from jdistgrad.optim.sharding import shard_state


def branches(params, x, which):
    chosen = params["both"] * x + params[which]
    return jnp.sum(chosen**2)


def test_used_must_be_given():
    tx = keep_unused(optax.adam(0.1))
    params = {"a": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"needs used=.*find_unused_parameters=True"):
        tx.update(params, tx.init(params), params, used=None)


@on_every_worker
def test_ranks_may_use_different_parameters(big_world, rank, size):
    dp = DataParallel(find_unused_parameters=True, bucket_cap_mb=1e-6)
    params = {"both": jnp.ones(()), "left": jnp.ones(()), "none": jnp.ones(2), "right": jnp.ones(())}
    which = "left" if rank == 0 else "right"
    tx = keep_unused(optax.adamw(0.1, weight_decay=0.1))
    state = tx.init(params)
    step = dp.value_and_grad(lambda p, x: branches(p, x, which))
    for _ in range(2):
        _, gradients = step(params, jnp.float32(rank))
        used = [jax.grad(branches)(params, jnp.float32(r), "right" if r else "left") for r in range(size)]
        jax.tree.map(lambda g, *own: np.testing.assert_allclose(g, sum(own) / size, rtol=1e-6), gradients, *used)
        updates, state = jax.jit(tx.update)(gradients, state, params, used=dp.used)
        params = optax.apply_updates(params, updates)
    assert dp.used == {"both": True, "left": True, "none": False, "right": True}
    assert dp.statistics().unused == ("['none']",)
    assert len(dp.statistics().bucket_sizes) == 4
    orders = dp.collectives.gather_objects(dp.statistics().order)
    assert orders == orders[:1] * size
    np.testing.assert_array_equal(params["none"], np.ones(2))
    np.testing.assert_array_equal(state[0].mu["none"], np.zeros(2))
    assert all(float(params[name]) < 1 for name in ("both", "left", "right"))
    dp.verify(params)


OPTIMIZERS = {
    "masked": optax.masked(optax.adam(0.1), {"a": True, "b": False}),
    "masked by a function": optax.masked(optax.adam(0.1), lambda params: jax.tree.map(lambda p: p.ndim > 0, params)),
    "several": optax.multi_transform({"x": optax.adam(0.1), "y": optax.sgd(0.1, momentum=0.9)}, {"a": "x", "b": "y"}),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "every second step": optax.MultiSteps(optax.adam(0.1), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_all_kinds_leave_unused_parameters_alone(name):
    tx = optax.with_extra_args_support(OPTIMIZERS[name])
    keeping, params = keep_unused(tx), {"a": jnp.ones(2), "b": jnp.ones(())}
    state = plain = tx.init(params)
    for used in ({"a": True, "b": True}, {"a": True, "b": False}, {"a": False, "b": True}):
        before = state
        updates, state = keeping.update(params, state, params, used=used)
        expected, plain = tx.update(params, before, params)
        for key, use in used.items():
            np.testing.assert_array_equal(updates[key], expected[key] if use else jnp.zeros_like(expected[key]))
            named = [str(path[-1]) == f"['{key}']" for path, _ in jax.tree_util.tree_leaves_with_path(state)]
            leaves = zip(named, *map(jax.tree.leaves, (state, plain, before)), strict=True)
            kept = [states for mine, *states in leaves if mine]
            assert kept or name.startswith("masked")
            for got, new, old in kept:
                np.testing.assert_array_equal(got, new if use else old)


OF_OTHER_SHAPES = {
    "factored": optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "along each axis": optax.sm3(0.1),
    "a number for each parameter": optax.scale_by_distance_over_gradients(),
}


@pytest.mark.parametrize("name", OF_OTHER_SHAPES)
def test_state_that_has_not_the_parameters_shapes_is_left_alone_too(name):
    tx = keep_unused(OF_OTHER_SHAPES[name])
    params = {"a": jnp.ones((2, 3, 4)), "b": jnp.ones((3, 5)), "c": jnp.ones(3)}
    _, before = jax.jit(tx.update)(params, tx.init(params), params, used=dict.fromkeys(params, True))
    doubled = jax.tree.map(lambda one: 2 * one, params)
    _, after = jax.jit(tx.update)(doubled, before, params, used={"a": False, "b": True, "c": False})
    _, plain = jax.jit(OF_OTHER_SHAPES[name].update)(doubled, before, params)
    for (path, got), old, new in zip(
        jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(before), jax.tree.leaves(plain), strict=True
    ):
        unused = any(str(key) in ("['a']", "['c']") for key in path)
        np.testing.assert_array_equal(got, old if unused else new)


@on_every_worker
def test_states_of_hooks_belong_to_buckets_not_to_parameters(big_world, rank, size):
    tx = keep_unused(average_gradients(hook=hooks.int8(block=4), bucket_cap_mb=1e-6))
    params = [jnp.linspace(0, 1, 5), jnp.linspace(1, 3, 7)]
    _, after = tx.update(params, tx.init(params), params, used=[False, False])
    assert [bool(jnp.any(error != 0)) for error in after.hook] == [True, True]


@on_every_worker
def test_counts_go_on_where_the_only_parameter_is_unused(big_world, rank, size):
    for inner in (optax.MultiSteps(optax.adam(0.1), 3), optax.add_noise(0.1, 0.1, 0)):
        tx, params = keep_unused(optax.chain(average_gradients(), inner)), jnp.ones(())
        first, used, unused = tx.init(params), jnp.bool(True), jnp.bool(False)
        _, state = jax.jit(tx.update)(params, first, params, used=used)
        updates, after = jax.jit(tx.update)(params, state, params, used=unused)
        _, twice = jax.jit(tx.update)(params, state, params, used=used)
        np.testing.assert_array_equal(updates, np.zeros(()))
        for mine, before, plain in zip(*map(jax.tree.leaves, (after, state, twice)), strict=True):
            assert jnp.all(mine == (before if jnp.issubdtype(mine.dtype, jnp.inexact) else plain))


@on_every_worker
def test_averages_and_slices_leave_unused_parameters_alone(big_world, rank, size):
    tx = keep_unused(optax.chain(average_gradients(hook=hooks.int8(block=4)), shard_state(optax.adam(0.1))))
    params = {"a": jnp.ones(5), "b": jnp.ones(3)}
    state = tx.init(params)
    for _ in range(2):
        before = state
        updates, state = jax.jit(tx.update)(params, state, params, used={"a": True, "b": False})
    np.testing.assert_array_equal(updates["b"], np.zeros(3))
    np.testing.assert_array_equal(state[1][0].mu["b"], np.zeros(-(-3 // size)))
    assert (np.asarray(state[1][0].mu["a"]) != np.asarray(before[1][0].mu["a"])).any() or rank


NAMES = ("both", "left", "none", "right")


def ones():
    return {name: jnp.ones(()) for name in NAMES}


def stepping(dp, which):
    step = dp.value_and_grad(lambda p, x: branches(p, x, which))
    return lambda: step(ones(), jnp.ones(()))[1]


def unreadable(params):
    def read():
        raise RuntimeError("no data")

    return params["none"] * jax.pure_callback(read, jax.ShapeDtypeStruct((), jnp.float32))


def used(*names):
    return {name: name in names for name in NAMES}


@on_every_worker
def test_steps_without_sync_count_for_the_next_average(big_world, rank, size):
    # The steps must not count for the average after that.
    dp = DataParallel(find_unused_parameters=True)
    left, right = stepping(dp, "left"), stepping(dp, "right")
    with dp.no_sync():
        total = left()
        if rank == 1:
            total = jax.tree.map(jnp.add, total, right())
    assert dp.used is None
    dp.average(total)
    assert dp.used == used("both", "left", "right")
    assert dp.statistics().unused == ("['none']",)
    left()
    assert dp.used == used("both", "left")
    assert dp.statistics().unused == ("['none']", "['right']")
    with dp.no_sync():
        left()
    right()
    assert dp.used == used("both", "left", "right")
    dp.average(total)  # no step is known for these gradients: all parameters count as used
    assert dp.used == used(*NAMES)
    dp.average({"another": jnp.ones(3)})
    assert dp.used == {"another": True}
    assert dp.statistics().unused == ()


@on_every_worker
def test_steps_without_sync_of_which_nothing_comes_do_not_count(big_world, rank, size):
    # Neither one that fails, nor those whose sum is not finite on some rank.
    dp = DataParallel(find_unused_parameters=True, check_finite=True)
    left, right = stepping(dp, "left"), stepping(dp, "right")
    with dp.no_sync():
        total = right()
        with pytest.raises(Exception, match="no data"):
            dp.value_and_grad(unreadable)(ones())
    if rank == 1:
        total = jax.tree.map(lambda leaf: leaf * jnp.nan, total)
    with pytest.raises(NonFiniteError):
        dp.average(total)
    with dp.no_sync():
        with pytest.raises(Exception, match="no data"):
            dp.value_and_grad(unreadable)(ones())
        total = left()
    dp.average(total)
    assert dp.used == used("both", "left")


@on_every_worker
def test_a_rank_that_has_joined_uses_nothing(big_world, rank, size):
    dp = DataParallel(find_unused_parameters=True)
    step = stepping(dp, "left" if rank == 0 else "right")
    with dp.join():
        step()
        if rank:
            step()
            assert dp.used == used("both", "right")
