"""Optimizers of all kinds, with averaged gradients and sharded state, compared with the serial program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.models import SMALL, batch, gradient, loss, mean_of, parameters, serially
from helpers.worlds import on_every_worker

from jdistgrad.collectives.default import of_this_world
from jdistgrad.data_parallel import hooks
from jdistgrad.errors import DisagreementError
from jdistgrad.optim.averaging import average_gradients, keep_unused, local_sgd
from jdistgrad.optim.sharding import shard_state


@functools.cache
def optimized_serially(tx, size, steps):
    """Return the parameters after some steps of an optimizer on the batches of all ranks."""

    def step(params, state, batches):
        _, gradients = mean_of(loss)(params, batches)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = parameters()
    state = tx.init(params)
    for k in range(steps):
        params, state = serially(step, params, state, [batch(r, seed=k) for r in range(size)])
    return params


EITHER_WAY = pytest.mark.parametrize(
    ("jitted", "plain"),
    [(True, optax.adamw(0.05, weight_decay=0.1)), (False, optax.sgd(0.05, momentum=0.9))],
    ids=["jit", "eager"],
)


@EITHER_WAY
@on_every_worker
def test_average_gradients_with_any_optimizer(big_world, jitted, plain, rank, size):
    expected = optimized_serially(plain, big_world.size, 3)
    tx = optax.chain(average_gradients(bucket_cap_mb=SMALL), plain)
    params, traced = parameters(), []
    state = tx.init(params)

    def update(gradients, state, params):
        traced.append(1)
        updates, state = tx.update(gradients, state, params, value=1.0)  # no transformation here uses value
        return optax.apply_updates(params, updates), state

    run = jax.jit(update) if jitted else update
    for k in range(3):
        params, state = run(gradient(loss)(params, batch(rank, seed=k)), state, params)
    assert_close(params, expected, rtol=2e-3, atol=2e-3)
    assert len(traced) == (1 if jitted else 3)


@on_every_worker
def test_average_gradients_under_inject_hyperparams(big_world, rank, size):
    c = of_this_world()

    @optax.inject_hyperparams
    def make(learning_rate):
        return optax.chain(average_gradients(c, hook=hooks.int8(block=16)), optax.sgd(learning_rate))

    tx = make(learning_rate=0.5)
    params = {"w": jnp.zeros(4), "skipped": None}
    state = tx.init(params)
    gradients = {"w": jnp.full(4, rank + 1.0), "skipped": None}
    for rate in (0.5, 0.25):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        updates, state = jax.jit(tx.update)(gradients, state, params)
        np.testing.assert_allclose(updates["w"], np.full(4, -rate * (size + 1) / 2), rtol=1e-2)
        assert updates["w"].dtype == jnp.float32


@pytest.mark.parametrize("told", [False, True], ids=["at once", "after an error on every rank"])
@pytest.mark.parametrize("make", [average_gradients, functools.partial(local_sgd, optax.identity(), every=1)])
@on_every_worker
def test_init_ends_what_a_failure_on_one_rank_has_begun(big_world, make, told, rank, size):
    # A new transformation would not: all with the same settings share what has come apart.
    fails = [True] if rank == 1 else []

    def apply(bucket, state, collectives):
        if fails:
            raise KeyError(fails.pop())
        return collectives.allreduce(bucket.flat / bucket.divisor), state + 1

    tx, params = make(hook=hooks.Hook(lambda bucket: jnp.zeros(()), apply, "failing")), {"w": jnp.zeros(4)}
    state, gradients = tx.init(params), {"w": jnp.full(4, rank + 1.0)}
    with pytest.raises(KeyError if rank == 1 else DisagreementError):
        tx.update(gradients, state, params)
    if told:
        with pytest.raises(DisagreementError):
            tx.update(gradients, state, params)
    tx.init(params)
    for _ in range(2):
        updates, _ = tx.update(gradients, state, params)
        np.testing.assert_allclose(updates["w"], np.full(4, (size + 1) / 2), rtol=1e-6)


@on_every_worker
def test_sharded_state_of_gradients_of_another_type_than_the_parameters(big_world, rank, size):
    """The optimizer masks by path, so it must see the parameters' tree."""

    def chain():
        return optax.chain(
            optax.masked(optax.add_decayed_weights(0.5), {"b": False, "w": True, "scale": True}),
            optax.scale_by_adam(mu_dtype=jnp.float32),
            optax.scale(-0.1),
        )

    params = {"b": jnp.arange(5.0), "w": jnp.ones((3, 4)), "scale": jnp.ones(())}
    gradients = jax.tree.map(lambda p: (p + 0.5).astype(jnp.bfloat16), params)

    def train(tx):
        now, state, update = params, tx.init(params), jax.jit(tx.update)
        for _ in range(3):
            updates, state = update(gradients, state, now)
            now = optax.apply_updates(now, updates)
        return now

    assert_close(train(shard_state(chain())), train(chain()), 1e-3)


@pytest.mark.parametrize(
    "around",
    [shard_state, functools.partial(local_sgd, every=3), keep_unused],
    ids=["sharded", "local", "unused kept"],
)
@on_every_worker
def test_what_an_optimizer_takes_besides_goes_on_to_it_below_multisteps(world, around, rank, size):
    def scaled(updates, state, params=None, *, value, **_):
        return jax.tree.map(lambda u: u * value, updates), state

    by_value = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scaled)
    tx = optax.MultiSteps(by_value, 2)
    params, gradients = jnp.arange(5.0), jnp.full(5, 2.0)
    wrapped, extra = around(tx), {"used": True} if around is keep_unused else {}
    state = wrapped.init(params)
    for value, expected in ((3.0, 0.0), (4.0, 8.0)):
        updates, state = wrapped.update(gradients, state, params, value=value, **extra)
        np.testing.assert_array_equal(updates, np.full(5, expected))
