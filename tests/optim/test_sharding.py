"""Sharded optimizer state: averages by reduce-scatter, bytes on the wire, states for other numbers of ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import path_aware_map
from helpers.data import assert_close
from helpers.models import batch, gradient, loss, parameters
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.data_parallel.collectives.default import of_this_world
from jdistgrad.data_parallel.collectives.local import Local


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

    def exchange_blocks(self, memory):
        self.sent += memory.nbytes - memory.nbytes // self.size
        return super().exchange_blocks(memory)

    def sum_blocks(self, memory):
        self.sent += memory.nbytes - memory.nbytes // self.size
        return super().sum_blocks(memory)

    def gather_arrays(self, memory):
        self.sent += memory.nbytes * (self.size - 1)
        return super().gather_arrays(memory)


@pytest.mark.one_process
@pytest.mark.world(2, 3, 4)
@on_every_worker
def test_bytes_on_the_wire(world, rank, size):
    counting = Counting()
    tx, params = jd.shard_state(optax.adam(0.1), counting, average=True), {"w": jnp.ones((12, 5)), "b": jnp.ones(24)}
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
    with pytest.raises(ValueError, match=r"shape \[\] for a parameter of the shape \[5, 2\].*outside of shard_state"):
        jd.gather_state(inner, part, params)
    with pytest.raises(ValueError, match=rf"shape \[5, 2\] for .*, expected \[{-(-10 // size)}\], a slice for {size}"):
        jd.gather_state(optax.adam(0.1), optax.adam(0.1).init(params), params)
    with pytest.raises(ValueError, match=r"divide_state: the state has a leaf of the shape \[\] .*, expected \[5, 2\]"):
        jd.divide_state(inner, inner.init(params), params)
