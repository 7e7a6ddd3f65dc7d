"""Uses of contexts that are closed, unknown or not the thread's own: a clear error, and the next pass works."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.programs import X, loss, square, still_differentiates
from helpers.worlds import on_worker0, rank

import jdistgrad as jd
from jdistgrad.autograd.contexts import Context
from jdistgrad.rpc.worker import current_worker


def make():
    return jnp.ones(3)


@on_worker0
def test_a_closed_context_is_refused(world):
    with jd.context() as ctx:
        rref = jd.remote(rank(1), make)
        gradient = jd.grad(lambda p: jd.rpc_sync(rank(2), square, args=(p,)).sum())(rref)
        pullback = jax.vjp(loss, X)[1]
    uses = [
        lambda: jd.get_gradients(ctx),
        lambda: jd.backward(ctx, loss, X),
        lambda: ctx.tape,
        lambda: jd.rpc_sync(0, jd.get_gradients, args=(ctx.id,)),
        lambda: pullback(jnp.float32(1)),
        gradient.to_here,
    ]
    for use in uses:
        with pytest.raises(jd.ContextError, match=r"context 0:\d+ has been closed.*inside its `with") as caught:
            use()
        assert caught.value.context == ctx.id
    still_differentiates()
    del gradient


@on_worker0
def test_a_context_this_worker_never_heard_of(big_world):
    with jd.context() as ctx:
        pass
    with pytest.raises(jd.ContextError, match=r"no context 0:\d+ on this worker"):
        jd.rpc_sync(1, jd.get_gradients, args=(ctx.id + 1,))
    for use in (jd.get_gradients, lambda which: jd.backward(which, loss, X)):
        with pytest.raises(jd.ContextError, match="no context 0:12345 on this worker"):
            use(12345)
        with pytest.raises(TypeError, match="expected a context"):
            use("0:1")
    still_differentiates()


@on_worker0
def test_a_second_block_needs_a_context_of_its_own(world):
    once = jd.context()
    with once as ctx:
        still_differentiates()
    with pytest.raises(jd.ContextError, match=r"for one block.*`with jdistgrad.context\(\) as ctx:` for each"), once:
        pass
    assert ctx.closed
    still_differentiates()


@on_worker0
def test_a_context_without_a_block_is_told_how_to_open_one(world):
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [jd.remote(rank(1), make)])
    for use in (jd.get_gradients, optimizer.step, lambda unopened: jd.backward(unopened, loss, X)):
        with pytest.raises(TypeError, match=r"a context, which `with jdistgrad.context\(\) as ctx:` gives"):
            use(jd.context())
    still_differentiates()


@on_worker0
def test_a_decorated_function_has_a_context_for_each_call(world):
    @jd.context()
    def gradient(x):
        return jax.grad(loss)(x)

    for _ in range(2):
        assert_close(gradient(X), 2 * X)


@on_worker0
def test_a_context_is_sent_by_its_number(world):
    told = r"Context\(0:\d+\) is this worker's. Send its number, ctx\.id"
    with jd.context() as ctx, pytest.raises(jd.EncodingError, match=told):
        pickle.dumps([ctx])


@on_worker0
def test_backward_in_a_context_other_than_the_threads(world):
    other = Context(current_worker(), current_worker().scopes.open())
    with jd.context(), pytest.raises(jd.ContextError, match="this thread is in context 0:"):
        jd.backward(other, loss, X)
    assert_close(jd.backward(other, loss, X)[1], (2 * X,))
    other.close()


def test_a_context_of_another_world_is_closed(world):
    """Though a context of this world has its id."""

    def main():
        contexts = []
        for _ in range(2):
            me = jd.init()
            if me.rank == 0:
                with jd.context() as ctx:
                    contexts.append(ctx)
                    for use in (jd.get_gradients, lambda which: jd.backward(which, loss, X)):
                        for stale in contexts[:-1]:
                            with pytest.raises(jd.ContextError, match=r"context 0:\d+ has been closed"):
                                use(stale)
            jd.shutdown()
        assert len({ctx.id for ctx in contexts}) <= 1

    world.run(main)


def test_a_reference_of_another_world(world):
    def main():
        jd.init()
        stale = jd.RRef(np.ones(3, np.float32)) if jd.worker_info().rank == 0 else None
        jd.shutdown()
        me = jd.init()
        if me.rank == 0:
            with pytest.raises(jd.StaleReferenceError, match="belongs to a world that has been shut down"):
                jd.grad(lambda p: jd.rpc_sync(rank(1), square, args=(p,)).sum())(stale)
            still_differentiates()
        assert jd.shutdown() == []

    world.run(main)
