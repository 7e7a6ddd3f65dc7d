"""The staged step: the same numbers as the serial program, and what it sends when."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistgrad as jd
from jdistgrad.autograd.tape import Tape
from jdistgrad.rpc.current import current_scope, current_worker

pytestmark = pytest.mark.world(1, 3)


@jax.jit
def affine(params, x):
    return params["w"] @ x + params["b"]


@jax.jit
def mix(x, y):
    return jnp.sin(x) * y


def as_written(x, y):
    return jnp.cos(x) * y


def make_params(seed):
    w, b = jax.random.split(jax.random.key(seed))
    return {"w": jax.random.normal(w, (2, 3)), "b": jax.random.normal(b, (2,))}


def through_the_next(x):
    return jd.rpc_sync((jd.worker_info().rank + 1) % jd.world_size(), mix, args=(x, x + 1))


def held_until_pulled(x):
    """Returns once its caller has asked for its pullback; at once where it is traced for its shapes."""
    deadline = time.monotonic() + 20
    while current_scope() and not jd.rpc_sync(0, pulls_sent):
        assert time.monotonic() < deadline, "nobody has asked for the pullback"
        time.sleep(0.01)
    return x * x


def pulls_sent():
    return sum(link.backward for link in current_scope().content(Tape).links)


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


def recordings():
    scope = current_scope()
    return 0 if scope is None else scope.content(Tape).statistics()["recordings"]


def fail(x):
    raise ValueError("no such luck")


compilations = {"count": 0}


def count_compilations(event, *_, **__):
    if event.endswith("backend_compile_duration"):
        compilations["count"] += 1


def compiled_so_far():
    return current_worker().rank, compilations["count"]


@pytest.fixture
def counted():
    """Compilations of this process are counted."""
    jax.monitoring.register_event_duration_secs_listener(count_compilations)
    yield
    jax.monitoring.clear_event_listeners()


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


X = jnp.array([0.3, -1.2, 2.0])


def last():
    return jd.world_size() - 1


@pytest.mark.parametrize("function", [mix, as_written, jnp.multiply], ids=["jitted", "as written", "of JAX"])
def test_gradients_equal_the_serial_ones(world, function):
    def body():
        def distributed(x, y):
            return (jd.rpc_sync(last(), function, args=(x, y)) * y).sum()

        def serial(x, y):
            return (function(x, y) * y).sum()

        step = jd.jit(jd.value_and_grad(distributed, argnums=(0, 1)))
        for shift in (1.0, 2.0):
            close(step(X, X * shift), jax.value_and_grad(serial, argnums=(0, 1))(X, X * shift))

    world.drive(body)


def test_parameters_that_stay_on_their_owners(world):
    def body():
        params = jd.remote(last(), make_params, args=(3,))

        def loss(params, x):
            return (jd.rpc_sync(0, affine, args=(params, x)) ** 2).sum()

        step = jd.jit(jd.value_and_grad(loss, argnums=(0, 1)))
        expected = jax.value_and_grad(lambda p, x: (affine(p, x) ** 2).sum(), argnums=(0, 1))(params.to_here(), X)
        with jd.context():
            value, (of_params, of_x) = step(params, X)
            close((value, (of_params.to_here(), of_x)), expected)
        value, (of_params, _) = step(params, X)  # a context of its own
        close(of_params.to_here(), expected[1][0])
        del of_params

    world.drive(body)


def test_values_that_are_made_during_the_step(world):
    def distributed(x):
        made = jd.remote(last(), mix, args=(x, x))
        there = jd.rpc_sync(0, mix, args=(made, x))
        return (there * made.to_here()).sum()

    def serial(x):
        made = mix(x, x)
        return (mix(made, x) * made).sum()

    def body():
        with jd.context():
            close(jd.jit(jd.value_and_grad(distributed))(X), jax.value_and_grad(serial)(X))
            twice = [jax.grad(lambda x, f=f: jax.grad(f)(x).sum()) for f in (distributed, serial)]
            close(jd.jit(twice[0])(X), twice[1](X))

    world.drive(body)


def test_nested_calls_and_second_derivatives(world):
    def distributed(x):
        return jd.rpc_sync(last(), through_the_next, args=(x,)).sum()

    def serial(x):
        return mix(x, x + 1).sum()

    def body():
        with jd.context():
            close(jd.jit(jax.jacrev(jax.grad(distributed)))(X), jax.jacrev(jax.grad(serial))(X))

    world.drive(body)


def test_scan_and_cond_with_calls_inside(world):
    def distributed(x):
        def turn(carry, k):
            return jax.lax.cond(
                k % 2 == 0, lambda c: jd.rpc_sync(last(), mix, args=(c, x)), lambda c: c * 0.5, carry
            ), carry.sum()

        return jax.lax.scan(turn, x, jnp.arange(4))[0].sum()

    def serial(x):
        for k in range(4):
            carry = x if k == 0 else carry  # noqa: F821 the first turn sets it
            carry = mix(carry, x) if k % 2 == 0 else carry * 0.5
        return carry.sum()

    def body():
        with jd.context():
            close(jd.jit(jd.value_and_grad(distributed))(X), jax.value_and_grad(serial)(X))

    world.drive(body)


arrived = threading.Condition()
waiting = set()


def meet(x, name, count):
    """Returns when so many such calls are being served at the same time."""
    with arrived:
        waiting.add(name)
        arrived.notify_all()
        if not arrived.wait_for(lambda: len(waiting) >= count, 20):
            raise TimeoutError(f"{name} is served alone")
    return x * 2


def test_independent_calls_are_under_way_together(world):
    """Each of three calls to one worker ends only when the others have come: one after the other they never would."""

    def body():
        jd.rpc_sync(last(), waiting.clear)
        step = jd.jit(lambda x: sum(jd.rpc_sync(last(), meeting(name), args=(x,)) for name in "abc"))
        close(step(X), X * 6)

    world.drive(body)


def meet_a(x):
    return forward(x, "a")


def meet_b(x):
    return forward(x, "b")


def meet_c(x):
    return forward(x, "c")


def forward(x, name):
    """Traced for its shape first: only a real array meets the others."""
    return x * 2 if isinstance(x, jax.core.Tracer) else meet(x, name, 3)


def meeting(name):
    return {"a": meet_a, "b": meet_b, "c": meet_c}[name]


def test_a_pullback_is_asked_for_before_the_call_has_been_answered(world):
    """Where the cotangent does not depend on the answer, nothing waits for it."""

    def body():
        step = jd.jit(jd.value_and_grad(lambda x: jd.rpc_sync(last(), held_until_pulled, args=(x,)).sum()))
        value, gradient = step(X)
        close((value, gradient), ((X * X).sum(), 2 * X))

    world.drive(body)


@jax.custom_vjp
def sleepy(x):
    return jax.pure_callback(take_a_nap, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


sleepy.defvjp(lambda x: (sleepy(x), None), lambda _, cotangent: (2 * cotangent,))


def take_a_nap(x):
    time.sleep(1.5)
    return 2 * np.asarray(x)


def sleep_and_double(x):
    return sleepy(x)


def test_a_pullback_has_time_to_wait_for_its_call(big_world):
    """The call may take longer than the world's calls; so may what was asked for together with it."""

    def body():
        step = jd.jit(jd.value_and_grad(lambda x: jd.rpc_sync(last(), sleep_and_double, args=(x,), timeout=20).sum()))
        close(step(X), ((2 * X).sum(), jnp.full(3, 2.0)))

    big_world.drive(body, timeout=1)


def test_a_pullback_from_outside_can_be_pulled_again(world):
    def body():
        with jd.context():
            _, pullback = jax.vjp(lambda x: jd.rpc_sync(last(), mix, args=(x, x)), X)
            staged = jd.jit(lambda pullback, cotangent: pullback(cotangent))
            found = [staged(pullback, X)[0], staged(pullback, 2 * X)[0], pullback(X)[0]]
        expected = X * (jnp.cos(X) * X + jnp.sin(X))
        close(found, [expected, 2 * expected, expected])

    world.drive(body)


def test_what_comes_out_is_an_array_of_its_own(world):
    def body():
        step = jd.jit(jd.value_and_grad(lambda x, unused: jd.rpc_sync(last(), mix, args=(x, x)).sum(), argnums=(0, 1)))
        _, (_, unused) = step(X, 2.0)
        assert float(unused.at[...].set(1.0)) == 1
        mine = np.ones(3)
        handed_through = jd.jit(lambda z: z)(mine)
        mine[0] = 7
        assert float(handed_through[0]) == 1

    world.drive(body)


def test_alike_pieces_are_compiled_once(big_world, counted):
    def body():
        step = jd.jit(lambda xs: sum(jd.rpc_sync(last(), mix, args=(x, x)).sum() * 3.5 for x in xs))
        xs = [X + k for k in range(12)]
        step(xs[:4])
        before = compilations["count"]
        found = step(xs)
        assert compilations["count"] == before
        close(found, sum((mix(x, x) * 3.5).sum() for x in xs))

    big_world.drive(body)


def test_a_reference_is_passed_on_before_its_value_is_made(world):
    def program(x):
        made = jd.remote(last(), held_until_released, args=(x,))
        y = jd.rpc_sync(last(), release, args=(jd.by_reference(made), x))
        return (made.to_here() * y).sum()

    def body():
        step = jd.jit(jd.value_and_grad(program))
        step.plan(X)  # traced, with the functions for their shapes
        jd.rpc_sync(last(), hold)
        with jd.context():
            value, gradient = step(X)
        close((value, gradient), ((X * X * (X + 1)).sum(), 3 * X * X + 2 * X))

    world.drive(body)


def test_retraced_only_on_new_shapes(world):
    traced = []

    def step(x):
        traced.append(x.shape)
        return jd.rpc_sync(last(), jnp.sin, args=(x,)).sum()

    def body():
        staged = jd.jit(step)
        for x in (X, X + 1, jnp.ones((2, 2)), X):
            close(staged(x), jnp.sin(x).sum())
        assert traced == [(3,), (2, 2)]

    world.drive(body)


def test_unused_calls_are_not_made(world):
    def step(x):
        jd.rpc_sync(last(), mix, args=(x, x))
        return x.sum()

    def body():
        assert jd.jit(step).plan(X).operations == []

    world.drive(body)


def test_what_was_pulled_for_the_last_time_is_forgotten(world):
    def body():
        step = jd.jit(jd.grad(lambda x: jd.rpc_sync(last(), mix, args=(x, x)).sum()))
        with jd.context():
            step(X)
            assert jd.rpc_sync(last(), recordings) == 0

    world.drive(body)


def through_three(x, y):
    for function in (mix, as_written, jnp.multiply):
        x = jd.rpc_sync(last(), function, args=(x, y))
    return x.sum()


def test_what_follows_on_one_worker_is_asked_for_in_one_message(world):
    def serial(x, y):
        return (as_written(mix(x, y), y) * y).sum()

    def body():
        step = jd.jit(jd.value_and_grad(through_three, argnums=(0, 1)))
        step.plan(X, X + 1)  # traced, with the functions for their shapes
        with jd.context() as ctx, jd.timeline() as recorded:
            close(step(X, X + 1), jax.value_and_grad(serial, argnums=(0, 1))(X, X + 1))
            assert jd.rpc_sync(last(), recordings) == 0
            pairs = [(link.what, link.backward) for link in ctx.tape.links if link.source == 0 and link.answers is None]
        assert len(pairs) == 6  # each call and each pullback has its place in the graph
        asked = [one.name for one in recorded.events if one.kind == "call" and "recordings" not in one.name]
        assert asked == [f"{mix.__module__}.mix, {mix.__module__}.as_written and 4 more"]

    world.drive(body)


@pytest.mark.parametrize("function", [mix, as_written], ids=["jitted", "as written"])
def test_a_large_cotangent_that_is_one_number_is_not_sent(world, function):
    def body():
        large = jnp.linspace(-1, 1, 1 << 16).reshape(2, -1)
        step = jd.jit(jd.value_and_grad(lambda x: 2.5 * jd.rpc_sync(last(), function, args=(x, x)).sum()))
        close(step(large)[1], jax.grad(lambda x: 2.5 * function(x, x).sum())(large))
        assert "broadcast" not in str(step.plan(large))

    world.drive(body)


def test_a_row_with_references_and_second_derivatives(world):
    def program(params, x):
        hidden = jd.rpc_sync(last(), affine, args=(params, x))
        return jd.rpc_sync(last(), jnp.tanh, args=(hidden,)).sum()

    def serial(params, x):
        return jnp.tanh(affine(params, x)).sum()

    def body():
        params = jd.remote(last(), make_params, args=(3,))
        values = params.to_here()
        with jd.context():
            _, (of_params, of_x) = jd.jit(jd.value_and_grad(program, argnums=(0, 1)))(params, X)
            close((of_params.to_here(), of_x), jax.grad(serial, argnums=(0, 1))(values, X))
            hessian = jd.jit(jax.jacrev(jax.grad(program, argnums=1), argnums=1))(params, X)
            close(hessian, jax.jacrev(jax.grad(serial, argnums=1), argnums=1)(values, X))

    world.drive(body)


def test_a_failure_in_a_row_names_the_function_that_failed(world):
    def program(x):
        x = jd.rpc_sync(last(), jnp.sin, args=(x,))
        return jd.rpc_sync(last(), sometimes, args=(jd.rpc_sync(last(), jnp.cos, args=(x,)),)).sum()

    def body():
        jd.rpc_sync(last(), forget_runs)
        step = jd.jit(program)
        step(X)
        with pytest.raises(ValueError, match="no such luck") as caught:
            step(X)
        notes = "\n".join(caught.value.__notes__)
        assert f"in {sometimes.__module__}.sometimes, called by" in notes
        close(step(X), jnp.cos(jnp.sin(X)).sum())

    world.drive(body)


def test_errors_say_where_the_call_stands(world):
    def body():
        jd.rpc_sync(last(), forget_runs)
        step = jd.jit(lambda x: jd.rpc_sync(last(), sometimes, args=(x,)))
        step(X)
        with pytest.raises(ValueError, match="no such luck") as caught:
            step(X)
        notes = "\n".join(caught.value.__notes__)
        assert "test_staged.py" in notes
        assert "test_errors_say_where_the_call_stands" in notes
        close(step(X), X)

    world.drive(body)


runs = []


def forget_runs():
    runs.clear()


def sometimes(x):
    """Fails at every second call with data."""
    if not isinstance(x, jax.core.Tracer):
        runs.append(x)
        if len(runs) % 2 == 0:
            raise ValueError("no such luck")
    return x


def test_arguments_must_be_arrays(world):
    def body():
        with pytest.raises(TypeError, match="str: 'text'"):
            jd.jit(lambda x: x)("text")

    world.drive(body)


def test_under_a_transformation_it_is_the_function_itself(world):
    def body():
        staged = jd.jit(lambda x: jd.rpc_sync(last(), mix, args=(x, x)).sum())
        with jd.context():
            close(jax.grad(staged)(X), jax.grad(lambda x: mix(x, x).sum())(X))

    world.drive(body)


def test_the_callee_compiles_once_per_shape(world, counted):
    def body():
        step = jd.jit(jd.value_and_grad(lambda x: jd.rpc_sync(last(), mix, args=(x, x)).sum()))
        first, *others = [X + k for k in range(6)]
        step(first)
        before = jd.rpc_sync(last(), compiled_so_far)
        for x in others:
            step(x)
        assert jd.rpc_sync(last(), compiled_so_far) == before

    world.drive(body)
