"""Contexts: made where they are needed, kept apart, and gone everywhere when their block ends."""

import contextvars
import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import identity, rank, same

import jdistgrad as jd
from jdistgrad.autograd.tape import Tape
from jdistgrad.rpc.current import current_scope, current_worker, within

pytestmark = pytest.mark.world(1, 3)

X = jnp.arange(1.0, 4.0)


def square(x):
    return x * x


def scaled(p, x):
    return p["w"] * x + p["n"]


def make(k):
    return {"w": jnp.arange(3.0) + k, "n": k}


def takes_part():
    return current_worker().scopes.identifiers()


def holders():
    """The ranks that take part in some context."""
    with within(None):
        return {k for k in range(jd.world_size()) if jd.rpc_sync(k, takes_part)}


def wait_until_nobody_takes_part():
    gc.collect()
    deadline = time.monotonic() + 20
    while found := holders():
        assert time.monotonic() < deadline, f"still taking part: {found}"
        time.sleep(0.005)


def in_thread(function, *args):
    """Run in a thread that belongs to this worker; it is in the contexts this one is in."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(function, *args))
    thread.start()
    return thread


def relay(path, x):
    return jd.rpc_sync(path[0], relay, args=(path[1:], x)) if path else x * x


def test_ids_have_their_creator_on_top(world):
    def open_here():
        with within(None), jd.context() as ctx:
            return ctx.id, jd.worker_info().rank

    def body():
        with jd.context() as ctx:
            assert ctx.id >> 48 == 0
            assert repr(ctx) == f"Context(0:{ctx.id & (1 << 48) - 1})"
        for k in range(jd.world_size()):
            first, second = (jd.rpc_sync(k, id_of_a_context) for _ in range(2))
            assert first >> 48 == second >> 48 == k
            assert second == first + 1

    world.drive(body)


def id_of_a_context():
    with jd.context() as ctx:
        return ctx.id


def test_many_contexts_one_after_another(world):
    def body():
        seen = set()
        for _ in range(200):
            with jd.context() as ctx:
                assert jd.get_gradients(ctx) == jd.get_gradients(ctx.id) == {}
                assert current_scope().id == ctx.id
            seen.add(ctx.id)
            with pytest.raises(jd.ContextError, match="has been closed"):
                jd.get_gradients(ctx.id)
            assert current_scope() is None
        assert len(seen) == 200

    world.drive(body)


def test_a_context_is_made_where_a_message_names_it(big_world):
    def body():
        with jd.context() as ctx:
            assert holders() == {0}
            jd.rpc_sync(1, identity, args=(5,))
            assert holders() == {0, 1}
            assert ctx.workers() == {1}
            jd.rpc_sync(2, identity, args=("no arrays at all",))
            assert holders() == ctx.workers() | {0} == {0, 1, 2}
        wait_until_nobody_takes_part()

    big_world.drive(body)


def test_workers_are_recorded_once_whatever_was_called(big_world):
    def body():
        with jd.context() as ctx:
            for _ in range(3):
                jd.rpc_async(1, identity, args=(X,)).result()
                jax.grad(lambda x: jd.rpc_sync(1, square, args=(x,)).sum())(X)
            assert ctx.workers() == {1}
            jd.remote(0, square, args=(X,)).to_here()
            assert ctx.workers() == {0, 1}

    big_world.drive(body)


def test_release_reaches_workers_that_only_others_called(big_world):
    def body():
        with jd.context() as ctx:
            same(jax.grad(lambda x: relay([1, 2], x).sum())(X), 2 * X)
            assert ctx.workers() == {1}
            assert holders() == {0, 1, 2}
        wait_until_nobody_takes_part()

    big_world.drive(body)


def test_release_by_an_exception(world):
    def body():
        path = [k % jd.world_size() for k in (1, 2, 3)]
        with pytest.raises(KeyError, match="in the block"), jd.context() as ctx:  # noqa: PT012
            jax.grad(lambda x: relay(path, x).sum())(X)
            raise KeyError("in the block")
        assert ctx.closed
        wait_until_nobody_takes_part()
        with jd.context():
            same(jax.grad(lambda x: relay(path, x).sum())(X), 2 * X)

    world.drive(body)


def test_nothing_is_recorded_where_nothing_is_differentiated(big_world):
    def body():
        with jd.context() as ctx:
            jd.rpc_sync(1, square, args=(X,))
            jd.remote(1, square, args=(X,)).to_here()
            assert ctx.tape.links == []
            assert jd.rpc_sync(1, recorded_here, args=(ctx.id,)) == 0
            jax.grad(lambda x: jd.rpc_sync(1, square, args=(x,)).sum())(X)
            assert jd.rpc_sync(1, recorded_here, args=(ctx.id,)) == 1

    big_world.drive(body)


def recorded_here(context):
    return current_worker().scopes.find(context).content(Tape).statistics()["recordings"]


def test_a_context_inside_another_is_refused(world):
    def body():
        with jd.context() as ctx:
            with pytest.raises(jd.ContextError, match="already in context 0:") as caught, jd.context():
                raise AssertionError("opened")
            assert caught.value.context == ctx.id
            assert current_scope().id == ctx.id
            with pytest.raises(jd.ContextError, match="not nested"):
                jd.rpc_sync(rank(1), id_of_a_context)

    world.drive(body)


def test_contexts_of_several_threads_do_not_mix(world):
    """All use the same parameters; each has gradients of its own."""

    def train(rref, k, results):
        for turn in range(5):
            x, mine = X * (k + turn), slice(None)
            with jd.context() as ctx:
                _, gradient = jd.value_and_grad(lambda p: jd.rpc_sync(rank(k), scaled, args=(p, x)).sum())(rref)  # noqa: B023
                assert len(jd.rpc_sync(rref.owner, gradients_here, args=(ctx.id,))) == 1
                np.testing.assert_array_equal(gradient.to_here()["w"][mine], x)
        results.append(k)

    def body():
        results = []
        rref = jd.remote(rank(1), make, args=(2,))
        threads = [in_thread(train, rref, k, results) for k in range(4)]
        for thread in threads:
            thread.join()
        assert sorted(results) == [0, 1, 2, 3]
        wait_until_nobody_takes_part()

    world.drive(body)


def test_a_thread_started_in_the_block_records_into_its_context(world):
    def body():
        found = []
        with jd.context() as ctx:
            differentiate = lambda: found.append(jax.grad(lambda x: relay([rank(1)], x).sum())(X))  # noqa: E731
            in_thread(differentiate).join()
            differentiate()
            assert sum(not link.backward for link in ctx.tape.links if link.answers is None) >= 2
            assert ctx.workers() >= {rank(1)}
        same(found, [2 * X, 2 * X])

    world.drive(body)


def gradients_here(context):
    return {rref.id: gradient for rref, gradient in jd.get_gradients(context).items()}


def test_gradients_are_held_by_the_owners(world):
    def body():
        rrefs = [jd.remote(rank(k), make, args=(k,)) for k in range(3)]
        loss = lambda *ps: sum(jd.rpc_sync(rank(k + 1), scaled, args=(p, X)).sum() * k for k, p in enumerate(ps))  # noqa: E731
        with jd.context() as ctx:
            jd.grad(loss, argnums=(0, 1, 2))(*rrefs)
            found = {}
            for owner in range(jd.world_size()):
                found.update(jd.rpc_sync(owner, gradients_here, args=(ctx.id,)))
            for k in (1, 2):
                gradient = found.pop(rrefs[k].id)
                np.testing.assert_array_equal(gradient["w"], k * X)
                assert gradient["n"] == rrefs[k].to_here()["n"]
            assert found.keys() <= {rrefs[0].id}
            assert {rref.owner.rank for rref in jd.get_gradients(ctx)} <= {0}

    world.drive(body)


def test_value_and_grad_opens_a_context_and_closes_it(world):
    def body():
        value, gradient = jd.value_and_grad(lambda x: relay([rank(1), rank(2)], x).sum())(X)
        same((value, gradient), (jnp.sum(X**2), 2 * X))
        wait_until_nobody_takes_part()
        same(jd.grad(lambda x: relay([rank(1)], x).sum())(X), 2 * X)
        wait_until_nobody_takes_part()

    world.drive(body)


def test_gradients_of_references_keep_the_context_they_need(world):
    def body():
        rref = jd.remote(rank(1), make, args=(2,))
        gradient = jd.grad(lambda p: jd.rpc_sync(rank(2), scaled, args=(p, X)).sum())(rref)
        assert holders() >= {0, rank(1)}
        np.testing.assert_array_equal(gradient.to_here()["w"], X)
        del gradient
        wait_until_nobody_takes_part()

    world.drive(body)


def test_an_error_in_value_and_grad_closes_its_context(world):
    def body():
        with pytest.raises(TypeError):
            jd.grad(lambda x: jd.rpc_sync(rank(1), relay, args=(x, None, "too many")))(X)
        wait_until_nobody_takes_part()

    world.drive(body)


def test_plain_grad_without_a_context(world):
    def body():
        with pytest.raises(jd.ContextError, match=r"test_contexts\.square.*outside any context.*value_and_grad"):
            jax.grad(lambda x: jd.rpc_sync(rank(1), square, args=(x,)).sum())(X)
        with pytest.raises(jd.ContextError, match="outside any context"):
            jax.grad(lambda x: jd.remote(rank(1), square, args=(x,)).to_here().sum())(X)
        assert holders() == set()
        same(jax.jit(lambda x: jd.rpc_sync(rank(1), square, args=(x,)))(X), X**2)  # not differentiated: needs none

    world.drive(body)


def test_backward_gathers_gradients_in_its_context(world):
    def body():
        rref = jd.remote(rank(1), make, args=(2,))
        with jd.context() as ctx:
            loss, (of_p, of_x) = jd.backward(ctx, lambda p, x: jd.rpc_sync(rank(2), scaled, args=(p, x)).sum(), rref, X)
            same((loss, of_x), (jnp.sum((jnp.arange(3.0) + 2) * X) + 6, jnp.arange(3.0) + 2))
            np.testing.assert_array_equal(of_p.to_here()["w"], X)

    world.drive(body)


def test_backward_without_calls(world):
    def body():
        with jd.context() as ctx:
            same(jd.backward(ctx.id, lambda x: jnp.sum(x**2), X), (jnp.sum(X**2), (2 * X,)))

    world.drive(body)


def test_several_roots(world):
    def body():
        def roots(x):
            return [jd.rpc_sync(rank(k), square, args=(x * (k + 1),)).sum() for k in range(4)]

        with jd.context() as ctx:
            values, (gradient,) = jd.backward(ctx, roots, X)
        same(values, [jnp.sum(((k + 1) * X) ** 2) for k in range(4)])
        same(gradient, 2 * (1 + 4 + 9 + 16) * X)

    world.drive(body)


def test_two_passes_add_up(world):
    """In the context, for references; what is returned for local arguments is of one pass, as JAX has it."""

    def body():
        rref = jd.remote(rank(1), make, args=(2,))
        loss = lambda p, x: jd.rpc_sync(rank(2), nested_scaled, args=(jd.by_reference(p), x)).sum()  # noqa: E731
        with jd.context() as ctx:
            for turn in (1, 2, 3):
                _, (of_p, of_x) = jd.backward(ctx, loss, rref, X)
                np.testing.assert_array_equal(of_p.to_here()["w"], turn * X)
                same(of_x, jnp.arange(3.0) + 2)
        with jd.context() as ctx:
            np.testing.assert_array_equal(jd.backward(ctx, loss, rref, X)[1][0].to_here()["w"], X)

    world.drive(body)


def nested_scaled(p, x):
    return jd.rpc_sync(rank(0), scaled, args=(p, x))


def test_one_parameter_used_by_all_workers_at_once(world):
    """Every worker runs passes of its own over worker 0's value."""

    def body():
        rref = jd.RRef(make(3))
        futures = [
            jd.rpc_async(k, pass_over, args=(jd.by_reference(rref), X * (k + 1))) for k in range(jd.world_size())
        ]
        for k, future in enumerate(futures):
            np.testing.assert_array_equal(future.result(), X * (k + 1))
        wait_until_nobody_takes_part()

    world.drive(body)


def pass_over(rref, x):
    found = []
    for _ in range(4):
        with jd.context():
            gradient = jd.grad(lambda p: jd.rpc_sync(0, scaled, args=(p, x)).sum())(rref)
            found.append(gradient.to_here()["w"])
    assert all((one == found[0]).all() for one in found)
    return found[0]


def test_nothing_accumulates_over_contexts(world):
    def body():
        rref = jd.remote(rank(1), make, args=(2,))
        loss = lambda p, x: jd.rpc_sync(rank(2), scaled, args=(p, relay([rank(1)], x))).sum()  # noqa: E731
        before = tapes()
        for _ in range(50):
            with jd.context():
                gradients = jd.grad(loss, argnums=(0, 1))(rref, X)
        del gradients
        wait_until_nobody_takes_part()
        assert tapes() <= before
        assert [jd.rpc_sync(k, owned_here) for k in range(jd.world_size())].count(0) == jd.world_size() - 1

    world.drive(body)


def tapes():
    gc.collect()
    return sum(isinstance(one, Tape) for one in gc.get_objects())


def owned_here():
    return len(current_worker().owned)


def test_what_a_step_made_is_freed_with_its_context(world):
    """References made on the way, and staged ones that only the context holds."""

    def body():
        def loss(x):
            rref = jd.remote(rank(1), square, args=(x,))
            return jd.rpc_sync(rank(2), square, args=(rref,)).sum()

        for step in (jax.grad(loss), jax.jit(jax.grad(loss))):
            with jd.context():
                same(step(X), 4 * X**3)
        wait_until_nobody_takes_part()
        gc.collect()
        deadline = time.monotonic() + 20
        while any(jd.rpc_sync(k, owned_here) for k in range(jd.world_size())):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    world.drive(body)


def test_a_compiled_step_still_running_at_the_end_of_the_block(world):
    """JAX dispatches compiled code and goes on: the end of the block waits for the calls it makes."""

    def body():
        step = jax.jit(jax.grad(lambda x: relay([rank(1)], x).sum() + later(x).sum()))
        with jd.context():
            found = step(X)
        same(found, 4 * X)

    world.drive(body)


def later(x):
    return jd.rpc_sync(rank(2), slow_square, args=(x,))


def slow_square(x):
    jax.debug.callback(lambda: time.sleep(0.05))
    return x * x
