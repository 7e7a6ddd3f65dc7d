"""The end of a context's block: it waits for calls under way, and leaves nothing of the context on any worker."""

import gc
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.programs import X, square
from helpers.worlds import (
    holders,
    make_weights,
    on_worker0,
    owned_values,
    rank,
    relay,
    scaled,
    wait_until_nobody_takes_part,
)

import jdistgrad as jd

pytestmark = pytest.mark.world(1, 3)


@on_worker0
def test_release_reaches_workers_that_only_others_called(big_world):
    with jd.context() as ctx:
        assert_close(jax.grad(lambda x: relay([1, 2], x).sum())(X), 2 * X)
        assert ctx.workers() == {1}
        assert holders() == {0, 1, 2}
    wait_until_nobody_takes_part()


@on_worker0
def test_release_by_an_exception(world):
    path = [k % jd.world_size() for k in (1, 2, 3)]
    with pytest.raises(KeyError), jd.context() as ctx:  # noqa: PT012
        jax.grad(lambda x: relay(path, x).sum())(X)
        raise KeyError("in the block")
    assert ctx.closed
    wait_until_nobody_takes_part()
    with jd.context():
        assert_close(jax.grad(lambda x: relay(path, x).sum())(X), 2 * X)


def scaled_loss(p, x):
    return jd.rpc_sync(rank(2), scaled, args=(p, x)).sum()


def kept_loss(p, x):
    return jd.remote(rank(2), scaled, args=(p, x)).to_here().sum()


def times(x, y):
    return jnp.sin(jd.rpc_sync(rank(2), jnp.multiply, args=(y, x)))


STEPS = {
    "of a reference": lambda ctx, p, x: jd.value_and_grad(scaled_loss)(p, x),
    "of a value that stays": lambda ctx, p, x: jd.value_and_grad(kept_loss)(p, x),
    "backward": lambda ctx, p, x: jd.backward(ctx, lambda p: scaled_loss(p, x), p),
    "of second order": lambda ctx, p, x: jax.jacrev(jax.grad(lambda y: times(x, y).sum()))(X),
    "staged": lambda ctx, p, x: jd.jit(lambda p: jd.value_and_grad(scaled_loss)(p, x)[0])(p),
    "forward": lambda ctx, p, x: jax.linearize(lambda y: times(x, y), X)[1](X),
}


def test_a_context_ends_with_its_world_also_when_its_block_does_not():
    """In a notebook a block may be entered in one cell, to be left in a later one."""
    block = jd.context()
    with jd.local_workers(2):
        block.__enter__()
    with jd.local_workers(2):
        with jd.context():
            assert_close(jd.grad(lambda x: jd.rpc_sync(1, square, args=(x,)).sum())(X), 2 * X)
        block.__exit__(None, None, None)
        assert_close(jd.rpc_sync(1, square, args=(X,)), X**2)


@pytest.mark.parametrize("name", STEPS)
@on_worker0
def test_what_a_step_has_used_is_gone_after_it(world, name):
    array, step = np.array if name in ("staged", "of a reference") else jnp.array, STEPS[name]
    rref, batch = jd.remote(rank(1), make_weights, args=(3,)), array([1.0, 2.0, 3.0], np.float32)
    gone = threading.Event()
    alive = weakref.ref(batch, lambda _: gone.set())
    with jd.context() as ctx:
        step(ctx, rref, batch)
    del batch
    wait_until_nobody_takes_part()
    gc.collect()
    assert gone.wait(60), alive()  # threads that have served calls may only now let their arguments go


@on_worker0
def test_what_a_step_made_is_freed_with_its_context(world):
    # The references are those that the eager step makes, and those of compiled code, which only the context holds.

    def loss(x):
        rref = jd.remote(rank(1), square, args=(x,))
        return jd.rpc_sync(rank(2), square, args=(rref,)).sum()

    for step in (jax.grad(loss), jax.jit(jax.grad(loss))):
        with jd.context():
            assert_close(step(X), 4 * X**3)
    wait_until_nobody_takes_part()
    gc.collect()
    deadline = time.monotonic() + 20
    while any(jd.rpc_sync(k, owned_values) for k in range(jd.world_size())):
        assert time.monotonic() < deadline
        time.sleep(0.005)


@on_worker0
def test_a_compiled_step_still_running_at_the_end_of_the_block(world):
    # JAX dispatches compiled code without waiting for it: the end of the block must wait for the calls of that code.
    step = jax.jit(jax.grad(lambda x: relay([rank(1)], x).sum() + later(x).sum()))
    with jd.context():
        found = step(X)
    assert_close(found, 4 * X)


def later(x):
    return jd.rpc_sync(rank(2), slow_square, args=(x,))


def slow_square(x):
    jax.debug.callback(lambda: time.sleep(0.05))
    return x * x
