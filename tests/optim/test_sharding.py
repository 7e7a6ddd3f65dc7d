"""Sharded optimizer state: averages by reduce-scatter, bytes on the wire, states for other numbers of ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import path_aware_map
from helpers.data import assert_close
from helpers.models import batch, gradient, loss, parameters
from helpers.transformations import TRANSFORMATIONS
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.collectives.default import of_this_world
from jdistgrad.collectives.host import Local
from jdistgrad.optim.sharding import require_elementwise


def trained(tx, rank, wrap=lambda f: f, steps=3):
    params = parameters()
    state, update = tx.init(params), wrap(tx.update)
    for k in range(steps):
        updates, state = update(gradient(loss)(params, batch(rank, seed=k)), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("jitted", [False, True], ids=["called", "jit"])
@on_every_worker
def test_averages_in_the_sharded_optimizer(world, jitted, rank, size):
    wrap = of_this_world().jit if jitted else lambda f: f
    inner = optax.sgd(0.1, momentum=0.9)
    params, state = trained(jd.shard_state(inner, average=True, bucket_cap_mb=2e-4), rank, wrap)
    expected, _ = trained(optax.chain(jd.average_gradients(), inner), rank)
    assert_close(params, expected, rtol=1e-3, atol=1e-3)
    sizes = jax.tree.map(lambda p: -(-p.size // size), params)
    assert jax.tree.map(jnp.size, optax.tree_utils.tree_get(state, "trace")) == sizes


@on_every_worker
def test_updates_are_those_without_sharding_to_the_bit(world, rank, size):
    # Two ranks add in one order only; more ranks add in the order of the ranks, here and in the serial sum.
    tx = jd.shard_state(optax.adam(0.1), average=True)
    params = {"w": jnp.linspace(-1, 1, 10), "b": jnp.float32(2)}
    each = [jax.tree.map(lambda p, r=r: jnp.sin(p * (r + 1)), params) for r in range(size)]
    total = jax.tree.map(lambda *all_: jnp.asarray(sum(np.divide(x, np.float32(size)) for x in all_)), *each)
    expected, _ = optax.adam(0.1).update(total, optax.adam(0.1).init(params))
    found, _ = tx.update(each[rank], tx.init(params), params)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


class Counting(Local):
    """Collectives that count the bytes that this rank sends to others."""

    sent = 0

    def run(self, name, memory, how=None):
        if name in ("allgather", "reduce_scatter", "alltoall"):
            whole = memory.nbytes * self.size if name == "allgather" else memory.nbytes
            self.sent += whole - whole // self.size
        return super().run(name, memory, how)


@pytest.mark.one_process
@pytest.mark.world(3, 4)
@on_every_worker
def test_bytes_on_the_wire(world, rank, size):
    counting = Counting()
    tx = jd.shard_state(optax.sgd(0.1), counting, average=True, try_first=False)
    params = {"w": jnp.ones((12, 5)), "b": jnp.ones(24)}
    state = tx.init(params)
    assert counting.sent == 0
    tx.update(params, state, params)
    assert counting.sent == 2 * (size - 1) * 84 * 4 // size


@on_every_worker
def test_a_state_that_other_numbers_of_ranks_go_on_with(big_world, rank, size):
    inner = optax.chain(optax.masked(optax.add_decayed_weights(0.1), {"w": True, "b": False}), optax.adam(0.1))
    params = {"w": jnp.linspace(-1, 1, 10).reshape(5, 2), "b": jnp.float32(2)}
    gradients = jax.tree.map(jnp.cos, params)

    def steps(tx, state, count):
        for _ in range(count):
            updates, state = tx.update(gradients, state, params)
        return updates, state

    serial_updates, serial_state = steps(inner, inner.init(params), 4)
    tx = jd.shard_state(inner)
    whole = jd.gather_state(inner, steps(tx, tx.init(params), 2)[1], params)
    assert jax.tree.map(jnp.shape, whole) == jax.tree.map(jnp.shape, inner.init(params))
    if rank < 2:  # two of the three go on
        with of_this_world([0, 1]) as pair:
            smaller = jd.shard_state(inner, pair)
            updates, state = steps(smaller, jd.divide_state(inner, whole, params, pair), 2)
            assert_close(updates, serial_updates)
            assert_close(jd.gather_state(inner, state, params, pair), serial_state)
    updates, state = steps(tx, jd.divide_state(inner, whole, params), 2)
    assert_close(updates, serial_updates)
    assert_close(jd.gather_state(inner, state, params), serial_state)


def labels_of(params):
    return path_aware_map(lambda path, _: {"w": "fast", "b": "slow"}[path[-1]], params)


@pytest.mark.parametrize(
    "inner",
    [
        optax.masked(optax.adam(0.1), {"w": True, "b": False}),
        optax.multi_transform({"fast": optax.adam(0.1), "slow": optax.sgd(0.1, 0.9)}, {"w": "fast", "b": "slow"}),
        optax.multi_transform({"fast": optax.adam(0.1), "slow": optax.sgd(0.1, 0.9)}, labels_of),
    ],
    ids=["masked", "multi_transform", "labels by path"],
)
@on_every_worker
def test_a_state_that_is_masked_is_gathered_and_divided(world, inner, rank, size):
    params = {"w": jnp.linspace(-1, 1, 10).reshape(5, 2), "b": jnp.float32(2)}
    gradients, tx = jax.tree.map(jnp.cos, params), jd.shard_state(inner)
    _, serial = inner.update(gradients, inner.init(params), params)
    _, state = tx.update(gradients, tx.init(params), params)
    whole = jd.gather_state(inner, state, params)
    assert_close(whole, serial)
    assert jax.tree.structure(whole) == jax.tree.structure(serial)
    assert_close(jd.divide_state(inner, whole, params), state)


@on_every_worker
def test_a_state_that_has_not_the_shapes_of_slices(world, rank, size):
    params, inner = {"w": jnp.ones((5, 2))}, optax.chain(optax.zero_nans(), optax.adam(0.1))
    part = jd.shard_state(inner).init(params)
    with pytest.raises(ValueError):
        jd.gather_state(inner, part, params)
    with pytest.raises(ValueError):
        jd.gather_state(optax.adam(0.1), optax.adam(0.1).init(params), params)
    with pytest.raises(ValueError):
        jd.divide_state(inner, inner.init(params), params)


REFUSED = {
    "optax": "adafactor adaptive_grad_clip add_noise apply_if_finite centralize clip_by_block_rms clip_by_global_norm "
    "lamb lars lbfgs noisy_sgd novograd scale_by_trust_ratio",
    "optax.contrib": "muon prodigy dadapt_adamw mechanize",
}
REFUSED = [f"{module}.{name}" for module, names in REFUSED.items() for name in names.split()]
REFUSED += ["chain(clip_by_global_norm, adam)", "chain(clip_by_global_norm, adam) every 3", "decay of matrices"]
ACCEPTED = [f"optax.{name}" for name in ["adam", "adamw", "sgd", "rmsprop", "lion", "radam", "yogi", "clip", "ema"]]
ACCEPTED += ["optax.contrib.schedule_free_adamw", "optax.contrib.reduce_on_plateau"]
ACCEPTED += ["chain(clip, adam)", "sgd every 3", "warmup", "decay of w"]
OFTEN = [*REFUSED[-2:], "sgd every 3", "warmup", "optax.contrib.reduce_on_plateau"]
PARAMS = {"a": {"w": jnp.linspace(-1, 1, 35).reshape(7, 5), "b": jnp.zeros(3)}, "s": {"w": jnp.float32(2)}}


def initial(sharded):
    """Return the state of a sharded optimizer, or None if it is refused."""
    try:
        return sharded.init(PARAMS)
    except ValueError as error:
        if "shard_state" not in str(error):
            raise
        return None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.long) for name in TRANSFORMATIONS]
)
@on_every_worker
def test_a_transformation_is_exact_or_refused(world, name, rank, size):
    each = [jax.tree.map(lambda p, r=r: 20 * jnp.sin(p * (r + 1.5) + r), PARAMS) for r in range(size)]
    average = jax.tree.map(lambda *all_: sum(all_) / size, *each)
    tx = TRANSFORMATIONS[name]
    tx = tx if isinstance(tx, optax.MultiSteps) else optax.with_extra_args_support(tx)
    sharded, extra = jd.shard_state(tx, average=True), {}
    state = initial(sharded)
    assert name not in (ACCEPTED if state is None else REFUSED)
    if state is None:
        return
    mine = [state, PARAMS]
    if not isinstance(tx, optax.MultiSteps):
        extra["value"] = jnp.float32(1)
    serial = [tx.init(PARAMS), PARAMS]
    for _ in range(4):
        for kept, update, given in ((mine, sharded.update, each[rank]), (serial, tx.update, average)):
            updates, kept[0] = update(given, kept[0], kept[1], **extra)
            kept[1] = optax.apply_updates(kept[1], updates)
    assert_close(mine[1], serial[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("average", "jitted", "most"), [(True, True, 0.5), (True, True, 1e6), (False, False, 0.5)])
@on_every_worker
def test_clipping_by_the_norm_over_all_slices(world, average, jitted, most, rank, size):
    wrap = of_this_world().jit if jitted else lambda f: f
    tx = jd.shard_state(optax.adam(0.1), average=average, max_global_norm=most)
    with jax.debug_nans(True):  # with which right programs go on
        tx.init(parameters())
    if not average:
        tx = optax.chain(jd.average_gradients(), tx)
    expected, _ = trained(optax.chain(jd.average_gradients(), optax.clip_by_global_norm(most), optax.adam(0.1)), rank)
    assert_close(trained(tx, rank, wrap)[0], expected, rtol=1e-3, atol=1e-3)


def test_second_moments_that_are_factored_in_large_matrices_only_are_refused_for_these():
    tx = optax.with_extra_args_support(optax.scale_by_factored_rms())
    require_elementwise(tx, {"w": jnp.ones((100, 200))})
    with pytest.raises(ValueError):
        require_elementwise(tx, {"b": jnp.ones(3), "w": jnp.ones((200, 300))})


def test_a_transformation_that_cannot_be_tried_is_refused_unless_that_is_left_out():
    failing = optax.GradientTransformation(lambda params: (), lambda updates, state, params: ({}[0], state))
    with pytest.raises(ValueError, match="try_first=False"):
        jd.shard_state(failing, Local.__new__(Local)).init({"w": jnp.ones(3)})
