"""Contexts: their ids, their parts on other workers, threads, and contexts that are closed or unknown."""

import contextvars
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.programs import X, identity, loss, square, still_differentiates
from helpers.worlds import (
    gradients_here,
    holders,
    make_weights,
    on_worker0,
    rank,
    relay,
    scaled,
    wait_until_nobody_takes_part,
)

import jdistgrad as jd
from jdistgrad.autograd.contexts import Context
from jdistgrad.autograd.tape.tape import Tape
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.worker import current_worker


def in_thread(function, *args):
    """Run a function in a new thread of this worker, inside the context of the current thread."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(function, *args))
    thread.start()
    return thread


@on_worker0
def test_ids_have_their_creator_on_top(world):
    with jd.context() as ctx:
        assert ctx.id >> 48 == 0
        assert repr(ctx) == f"Context(0:{ctx.id & (1 << 48) - 1})"
    for k in range(jd.world_size()):
        first, second = (jd.rpc_sync(k, id_of_a_context) for _ in range(2))
        assert first >> 48 == second >> 48 == k
        assert second == first + 1


def id_of_a_context():
    with jd.context() as ctx:
        return ctx.id


@on_worker0
def test_many_contexts_one_after_another(world):
    seen = set()
    for _ in range(200):
        with jd.context() as ctx:
            assert jd.get_gradients(ctx) == jd.get_gradients(ctx.id) == {}
            assert current_scope().id == ctx.id
        seen.add(ctx.id)
        with pytest.raises(jd.ContextError):
            jd.get_gradients(ctx.id)
        assert current_scope() is None
    assert len(seen) == 200


@on_worker0
def test_a_context_is_made_where_a_message_names_it(big_world):
    with jd.context() as ctx:
        assert holders() == {0}
        jd.rpc_sync(1, identity, args=(5,))
        assert holders() == {0, 1}
        assert ctx.workers() == {1}
        jd.rpc_sync(2, identity, args=("no arrays at all",))
        assert holders() == ctx.workers() | {0} == {0, 1, 2}
    wait_until_nobody_takes_part()


@on_worker0
def test_a_context_inside_another_is_refused(world):
    with jd.context() as ctx:
        with pytest.raises(jd.ContextError, match="already in context 0:") as caught, jd.context():
            raise AssertionError("opened")
        assert caught.value.context == ctx.id
        assert current_scope().id == ctx.id
        with pytest.raises(jd.ContextError):
            jd.rpc_sync(rank(1), id_of_a_context)


@on_worker0
def test_contexts_of_several_threads_do_not_mix(world):
    # All threads use the same parameters, but each has its own gradients.

    def train(rref, k, results):
        for turn in range(5):
            x, mine = X * (k + turn), slice(None)
            with jd.context() as ctx:
                _, gradient = jd.value_and_grad(lambda p: jd.rpc_sync(rank(k), scaled, args=(p, x)).sum())(rref)  # noqa: B023
                assert len(jd.rpc_sync(rref.owner, gradients_here, args=(ctx.id,))) == 1
                np.testing.assert_array_equal(gradient.to_here()["w"][mine], x)
        results.append(k)

    results = []
    rref = jd.remote(rank(1), make_weights, args=(2,))
    threads = [in_thread(train, rref, k, results) for k in range(4)]
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2, 3]
    wait_until_nobody_takes_part()


@on_worker0
def test_a_thread_started_in_the_block_records_into_its_context(world):
    found = []
    with jd.context() as ctx:
        differentiate = lambda: found.append(jax.grad(lambda x: relay([rank(1)], x).sum())(X))  # noqa: E731
        in_thread(differentiate).join()
        differentiate()
        assert sum(not link.backward for link in ctx.tape.all_links() if link.answers is None) >= 2
        assert ctx.workers() >= {rank(1)}
    assert_close(found, [2 * X, 2 * X])


@on_worker0
def test_compiled_code_belongs_to_the_context_of_whoever_calls_it(world):
    # Code in no context, and code compiled ahead of time, are known by the first slot, which another context has.
    loss = lambda p: jd.rpc_sync(rank(1), scaled, args=(p, X)).sum()  # noqa: E731
    rref, found, nowhere = jd.remote(rank(1), make_weights, args=(2,)), {}, contextvars.copy_context()
    differentiate, called = jax.jit(jax.grad(loss)), jax.jit(lambda x: relay([rank(1), rank(2)], x))
    with jd.context():
        ahead_of_time = jax.jit(jax.grad(loss)).lower(rref).compile()
        assert_close(called(X), relay([], X))

    def outside():
        with pytest.raises(Exception, match="differentiated outside any context"):
            differentiate(rref)
        assert_close(called(X), relay([], X))

    def inside():
        with within(None), jd.context() as own:
            ahead_of_time(rref)
            found["own"] = len(jd.rpc_sync(rank(1), gradients_here, args=(own.id,)))

    with jd.context() as ctx:
        first = threading.Thread(target=nowhere.run, args=(outside,))
        first.start()
        first.join()
        assert not ctx.workers()
        in_thread(inside).join()
        jd.value_and_grad(loss)(rref)
        np.testing.assert_array_equal(jd.rpc_sync(rank(1), gradients_here, args=(ctx.id,))[rref.id]["w"], X)
    assert found == {"own": 1}


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
    with pytest.raises(jd.ContextError):
        jd.rpc_sync(1, jd.get_gradients, args=(ctx.id + 1,))
    for use in (jd.get_gradients, lambda which: jd.backward(which, loss, X)):
        with pytest.raises(jd.ContextError):
            use(12345)
        with pytest.raises(TypeError, match="expected a context"):
            use("0:1")
    still_differentiates()


@on_worker0
def test_a_context_without_a_block_is_told_how_to_open_one(world):
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [jd.remote(rank(1), make)])
    for use in (jd.get_gradients, optimizer.step, lambda unopened: jd.backward(unopened, loss, X)):
        with pytest.raises(TypeError, match=r"a context, which `with jdistgrad.context\(\) as ctx:` gives"):
            use(jd.context())
    still_differentiates()


@on_worker0
def test_contexts_references_and_their_gradients_are_not_pickled(world):
    rref = jd.remote(rank(1), make)
    with jd.context() as ctx:
        for one in (ctx, rref, jd.grad(lambda p: p.to_here().sum())(rref)):
            with pytest.raises(jd.EncodingError):
                pickle.dumps([one])


@on_worker0
def test_backward_in_a_context_other_than_the_threads(world):
    other = Context(current_worker(), current_worker().scopes.enter(next(current_worker().scopes.ids)))
    with jd.context(), pytest.raises(jd.ContextError):
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
                            with pytest.raises(jd.ContextError):
                                use(stale)
            jd.shutdown()
        assert len({ctx.id for ctx in contexts}) <= 1

    world.run(main)


@on_worker0
def test_nothing_is_recorded_where_nothing_is_differentiated(big_world):
    with jd.context() as ctx:
        jd.rpc_sync(1, square, args=(X,))
        jd.remote(1, square, args=(X,)).to_here()
        assert ctx.tape.all_links() == []
        assert jd.rpc_sync(1, recorded_here, args=(ctx.id,)) == 0
        jax.grad(lambda x: jd.rpc_sync(1, square, args=(x,)).sum())(X)
        assert jd.rpc_sync(1, recorded_here, args=(ctx.id,)) == 1


def recorded_here(context):
    return len(current_worker().scopes.find(context).content(Tape).recordings)
