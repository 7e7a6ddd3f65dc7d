"""The order and the number of the messages of a staged step."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.programs import X, mix
from helpers.worlds import last, on_worker0
from jax.experimental import io_callback

import jdistgrad as jd
from jdistgrad.autograd.tape.tape import Tape
from jdistgrad.rpc.current import current_scope

pytestmark = pytest.mark.world(1, 3)

ONE = jax.ShapeDtypeStruct((), jnp.float32)


def held_until_pulled(x):
    """Return once the caller has requested the pullback, or at once if the function is traced for its shapes."""
    deadline = time.monotonic() + 20
    while current_scope() and not jd.rpc_sync(0, pulls_sent):
        assert time.monotonic() < deadline, "nobody has asked for the pullback"
        time.sleep(0.01)
    return x * x


def pulls_sent():
    return sum(link.backward for link in current_scope().content(Tape).all_links())


RELEASED = threading.Event()
RELEASED.set()


def hold():
    RELEASED.clear()


def held_until_released(x):
    assert RELEASED.wait(20), "nobody has released it"
    return x * x


def release(reference, x):
    RELEASED.set()
    return x + 1


arrived = threading.Condition()
waiting = set()


def meet(x, name, count):
    """Return when ``count`` calls of this function are being served at the same time."""
    with arrived:
        waiting.add(name)
        arrived.notify_all()
        if not arrived.wait_for(lambda: len(waiting) >= count, 20):
            raise TimeoutError(f"{name} is served alone")
    return x * 2


@on_worker0
def test_independent_calls_are_under_way_together(world):
    # Each of the three calls to one worker ends only when all have arrived: served in sequence, they would time out.
    jd.rpc_sync(last(), waiting.clear)
    step = jd.jit(lambda x: sum(jd.rpc_sync(last(), meeting(name), args=(x,)) for name in "abc"))
    assert_close(step(X), X * 6)


def meet_a(x):
    return forward(x, "a")


def meet_b(x):
    return forward(x, "b")


def meet_c(x):
    return forward(x, "c")


def forward(x, name):
    """Meet the other calls if ``x`` is a real array, not the tracer of the first call, which is for shapes."""
    return x * 2 if isinstance(x, jax.core.Tracer) else meet(x, name, 3)


def meeting(name):
    return {"a": meet_a, "b": meet_b, "c": meet_c}[name]


@on_worker0
def test_a_pullback_is_asked_for_before_the_call_has_been_answered(world):
    # The cotangent does not depend on the answer, so the pull need not wait for the answer.
    step = jd.jit(jd.value_and_grad(lambda x: jd.rpc_sync(last(), held_until_pulled, args=(x,)).sum()))
    value, gradient = step(X)
    assert_close((value, gradient), ((X * X).sum(), 2 * X))


@on_worker0
def test_a_reference_is_passed_on_before_its_value_is_made(world):
    def program(x):
        made = jd.remote(last(), held_until_released, args=(x,))
        y = jd.rpc_sync(last(), release, args=(jd.by_reference(made), x))
        return (made.to_here() * y).sum()

    step = jd.jit(jd.value_and_grad(program))
    step.plan(X)  # traces the step, and the functions for their shapes
    jd.rpc_sync(last(), hold)
    with jd.context():
        value, gradient = step(X)
    assert_close((value, gradient), ((X * X * (X + 1)).sum(), 3 * X * X + 2 * X))


@on_worker0
def test_ordered_effects_keep_the_programs_order(world):
    noted = []

    def note(name):
        noted.append(name)
        return np.float32(1)

    def program(x):
        y = jd.rpc_sync(last(), held_until_released, args=(x,)).sum()
        for _ in range(3):  # the first waits for the answer; the others need nothing
            y = y * io_callback(lambda _: note("of the answer"), ONE, y, ordered=True)
            io_callback(lambda: note("no result") and None, None, ordered=True)
            y = y * io_callback(lambda: note("no argument"), ONE, ordered=True)
        return y

    step = jd.jit(program)
    for _ in range(2):
        noted.clear()
        assert_close(step(X), (X * X).sum())
        jax.effects_barrier()
        assert noted == ["of the answer", "no result", "no argument"] * 3


def recordings():
    scope = current_scope()
    return 0 if scope is None else len(scope.content(Tape).recordings)


@on_worker0
def test_unused_calls_are_not_made(world):
    def step(x):
        jd.rpc_sync(last(), mix, args=(x, x))
        return x.sum()

    assert jd.jit(step).plan(X).operations == []


@on_worker0
def test_what_was_pulled_for_the_last_time_is_forgotten(world):
    step = jd.jit(jd.grad(lambda x: jd.rpc_sync(last(), mix, args=(x, x)).sum()))
    with jd.context():
        step(X)
        assert jd.rpc_sync(last(), recordings) == 0


def through_three(x, y):
    for function in (mix, jnp.add, jnp.multiply):
        x = jd.rpc_sync(last(), function, args=(x, y))
    return x.sum()


@on_worker0
def test_what_follows_on_one_worker_is_asked_for_in_one_message(world):
    def serial(x, y):
        return ((mix(x, y) + y) * y).sum()

    step = jd.jit(jd.value_and_grad(through_three, argnums=(0, 1)))
    step.plan(X, X + 1)  # traces the step, and the functions for their shapes
    with jd.context() as ctx, jd.timeline() as recorded:
        assert_close(step(X, X + 1), jax.value_and_grad(serial, argnums=(0, 1))(X, X + 1))
        assert jd.rpc_sync(last(), recordings) == 0
        pairs = [
            (link.what, link.backward) for link in ctx.tape.all_links() if link.source == 0 and link.answers is None
        ]
    assert len(pairs) == 6  # each call and each pullback has its place in the graph
    asked = [one.name for one in recorded.events if one.kind == "call" and "recordings" not in one.name]
    assert asked == [f"{mix.__module__}.mix, jax.numpy.add and 4 more"]


@pytest.mark.parametrize("function", [mix, jnp.multiply], ids=["jitted", "of JAX"])
@on_worker0
def test_a_large_cotangent_that_is_one_number_is_not_sent(world, function):
    large = jnp.linspace(-1, 1, 1 << 16).reshape(2, -1)
    step = jd.jit(jd.value_and_grad(lambda x: 2.5 * jd.rpc_sync(last(), function, args=(x, x)).sum()))
    assert_close(step(large)[1], jax.grad(lambda x: 2.5 * function(x, x).sum())(large))
    assert "broadcast" not in str(step.plan(large))
