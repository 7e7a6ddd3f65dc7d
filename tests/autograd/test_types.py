"""Weakly typed arrays and random keys, which dtypes do not describe: programs give the results of one process."""

import dataclasses
import functools
import gc
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.programs import fetched, handed_on, serial, sync
from helpers.worlds import last, on_worker0, rank

import jdistgrad as jd

X = jnp.array([0.5, -1.5, 2.0], jnp.bfloat16)

EAGER_AND_COMPILED = pytest.mark.parametrize(
    "compiled", [lambda f: f, jax.jit, jd.jit], ids=["eager", "jax.jit", "jd.jit"]
)


def scaled(x, s):
    """Return a product, scaled according to its dtype."""
    product = x * s
    return product * (2 if product.dtype == jnp.bfloat16 else 3)


fast_scaled = jax.jit(scaled)


def by_weak(call, function, x, s):
    return call(1, function, x, s).astype(jnp.float32).sum()


def number_of(call, x):
    """Return a loss that multiplies a narrow array by a remote result, a number that may be weakly typed."""
    return (call(1, jnp.sum, x) * X).astype(jnp.float32).sum()


@EAGER_AND_COMPILED
@pytest.mark.parametrize(("way", "function"), [(sync, scaled), (handed_on, scaled), (sync, fast_scaled)])
@on_worker0
def test_weak_arguments(big_world, function, way, compiled):
    for s in (0.5, jnp.broadcast_to(jnp.asarray(0.5), (3,)), jnp.float32(0.5)):
        derivative = lambda call: jax.value_and_grad(functools.partial(by_weak, call, function), (0, 1))  # noqa: E731
        with jd.context():
            assert_close(compiled(derivative(way))(X, s), derivative(serial)(X, s), rtol=1e-2)


@EAGER_AND_COMPILED
@pytest.mark.parametrize("way", [sync, fetched])
@on_worker0
def test_weak_results(big_world, way, compiled):
    # A returned number with a weak type adopts the dtype of narrow arrays, and so does its gradient.
    derivative = lambda call: lambda x: jax.grad(functools.partial(number_of, call))(x) * X  # noqa: E731
    for x in (jnp.asarray(0.5), jnp.float32(0.5)):
        with jd.context():
            assert_close(compiled(derivative(way))(x), derivative(serial)(x), rtol=1e-2)


def as_written(x, n):
    """Compute what arrays of NumPy would change: they are changed in place, and their operators give other dtypes."""
    more = x
    more += 1
    return (more * x + 0.1).at[0].set(0) * (n / 3)


def in_a_loop(function):
    return lambda x, n: jax.lax.map(lambda x: function(x, n), x[None])


def derived(function):
    return jax.grad(lambda x, n: function(x, n).astype(jnp.float32).sum())


@EAGER_AND_COMPILED
@pytest.mark.parametrize(
    ("way", "size"), [(sync, 3), (sync, 1 << 16), (handed_on, 3)], ids=["here", "large", "handed on"]
)
@on_worker0
def test_a_function_that_runs_as_written_gets_arrays_of_jax(big_world, way, compiled, size):
    x, n = jnp.linspace(-1, 2, size, dtype=jnp.bfloat16), jnp.asarray(5, jnp.int8)
    for around in (derived, lambda f: derived(in_a_loop(f)))[: 2 if size == 3 else 1]:
        with jd.context():
            found = compiled(around(functools.partial(way, 1, as_written)))(x, n)
        assert_close(found, around(as_written)(x, n))


@jax.custom_vjp
def ruled(x):
    return 2 * x


def ruled_backward(x, g):
    more = g
    more += 1
    return ((more * g * x).at[0].set(0),)


ruled.defvjp(lambda x: (2 * x, x), ruled_backward)


def by_a_rule(x):
    return ruled(x)


@EAGER_AND_COMPILED
@pytest.mark.parametrize("way", [sync, fetched])
@on_worker0
def test_a_custom_rule_gets_arrays_of_jax(big_world, way, compiled):
    x = jnp.array([0.5, -1.5, 2.0])
    twice = lambda f: jax.grad(lambda x: jnp.sin(jax.grad(f)(x)).sum())  # noqa: E731
    looped = lambda f: lambda x: jax.lax.map(f, x[None]).sum()  # noqa: E731
    for around in (twice, lambda f: jax.grad(looped(f))):
        expected = around(lambda x: jnp.cos(by_a_rule(x)).sum())(x)
        with jd.context():
            found = compiled(around(lambda x: jnp.cos(way(1, by_a_rule, x)).sum()))(x)
        assert_close(found, expected)


def with_keys(x, key, *, impl):
    """Return results with random keys of two kinds; those of one kind come from an argument."""
    more = jax.random.split(key, 3)
    noise = jax.random.normal(key, x.shape)
    return {"y": x**2 * noise, "keys": more, "other": jax.random.key(7, impl=impl), "n": jnp.argmax(x)}


def use_keys(parts, x):
    assert jax.dtypes.issubdtype(parts["keys"].dtype, jax.dtypes.prng_key)
    noise = jax.random.normal(parts["keys"][1], x.shape) + jax.random.uniform(parts["other"], x.shape)
    return (parts["y"] * noise * x).sum() + parts["n"]


fast_with_keys = jax.jit(with_keys, static_argnames="impl")


def by_keys(call, function, x, key, impl="rbg"):
    parts = call(1, function, x, key, impl=impl)
    return call(2, use_keys, parts, x) + use_keys(parts, x)


Y = jnp.array([0.3, -1.2, 2.0, 0.7])


@EAGER_AND_COMPILED
@pytest.mark.parametrize(("way", "function"), [(sync, with_keys), (handed_on, with_keys), (sync, fast_with_keys)])
@on_worker0
def test_random_keys(big_world, function, way, compiled):
    key = jax.random.key(3)
    first = lambda call: jax.value_and_grad(functools.partial(by_keys, call, function))  # noqa: E731
    second = lambda call: jax.grad(lambda x, key: (first(call)(x, key)[1] * Y).sum())  # noqa: E731
    expected = first(serial)(Y, key)
    with jd.context():
        assert_close(compiled(first(way))(Y, key), expected, rtol=1e-4, atol=1e-5)
        assert_close(compiled(lambda x: first(way)(x, key))(Y), expected, rtol=1e-4, atol=1e-5)  # the key is not traced
        if (way, function) == (sync, with_keys):
            assert_close(compiled(second(way))(Y, key), second(serial)(Y, key), rtol=1e-4, atol=1e-5)


ALIVE = weakref.WeakSet()


class Noisy:
    """A function that holds data."""

    def __init__(self, data):
        self.data = data
        ALIVE.add(self)

    def __call__(self, x, key):
        return (x * self.data * jax.random.normal(key, x.shape)).sum()

    def __reduce__(self):
        return Noisy, (self.data,)


def number_alive():
    gc.collect()
    return len(ALIVE)


@EAGER_AND_COMPILED
@on_worker0
def test_a_function_that_holds_data_is_let_go_after_its_call(world, compiled):
    key = jax.random.key(3)
    for k in range(2):
        loss = lambda call, x: call(last(), Noisy(np.asarray(Y) + k), x, key)  # noqa: E731, B023
        with jd.context():
            assert_close(
                compiled(jax.grad(functools.partial(loss, sync)))(Y), jax.grad(functools.partial(loss, serial))(Y)
            )
    jax.clear_caches()
    deadline = time.monotonic() + 20
    while alive := number_alive() + jd.rpc_sync(last(), number_alive):
        assert time.monotonic() < deadline, f"{alive} functions are alive"
        time.sleep(0.01)


def make_keyed(n):
    return {"w": jnp.arange(1.0, n + 1) / n, "key": jax.random.key(5), "scale": jnp.asarray(0.5)}


def keyed_loss(value, x):
    return (jax.random.normal(value["key"], x.shape) * value["w"] * x * value["scale"]).sum()


@EAGER_AND_COMPILED
@pytest.mark.parametrize("here", [True, False], ids=["fetched", "handed on"])
@on_worker0
def test_references_to_keys(big_world, here, compiled):
    value, near = jd.remote(rank(1), make_keyed, args=(4,)), make_keyed(4)

    def loss(value, x):
        return keyed_loss(value.to_here(), x) if here else jd.rpc_sync(rank(2), keyed_loss, args=(value, x))

    step = compiled(jd.value_and_grad(loss, argnums=(0, 1)))
    with jd.context():
        result, (by_value, by_x) = step(value, Y)
        found = by_value.to_here()
    assert_close((result, by_x), jax.value_and_grad(lambda x: keyed_loss(near, x))(Y))
    floats = jax.grad(lambda w, s: keyed_loss({**near, "w": w, "scale": s}, Y), argnums=(0, 1))
    assert_close((found["w"], found["scale"]), floats(near["w"], near["scale"]))
    assert found["key"] is None


def without_derivative(x, n):
    """Return results without derivatives beside a float: integers, booleans, a string and a NumPy array."""
    return {"y": x * n, "n": n + 1, "flags": x > 0, "word": "told", "host": np.arange(2)}


@EAGER_AND_COMPILED
@pytest.mark.parametrize("way", [sync, handed_on])
@on_worker0
def test_results_without_derivatives(big_world, way, compiled):
    def loss(call, x, n):
        parts = call(1, without_derivative, x, n)
        assert parts["word"] == "told"
        return (parts["y"] * parts["n"] * parts["flags"]).sum() + parts["host"].sum()

    derivative = lambda call: jax.grad(functools.partial(loss, call), argnums=(0, 1), allow_int=True)  # noqa: E731
    with jd.context():
        assert_close(compiled(derivative(way))(Y, jnp.int32(3)), derivative(serial)(Y, jnp.int32(3)))


def squashed(p, x):
    return jnp.tanh(p * x) + p * p


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices: the local run has them, and that with 3 ranks")
@pytest.mark.parametrize(("compiled", "derivative"), [(jax.jit, jax.grad), (jd.jit, jax.hessian)])
@on_worker0
def test_arguments_with_explicit_axes(big_world, compiled, derivative):
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.local_devices()[:4])
    p, x = np.linspace(-1, 1, 8, dtype="float32"), np.linspace(2, 0, 8, dtype="float32")

    def loss(call, p, x):
        return (call(1, squashed, p, x) * x).sum()

    expected = derivative(functools.partial(loss, serial), (0, 1))(p, x)
    with jax.set_mesh(mesh), jd.context():
        split = jax.device_put((p, x), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows")))
        found = compiled(derivative(functools.partial(loss, sync), (0, 1)))(*split)
    assert_close(found, expected, rtol=1e-4, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Named:
    """A function that equals others of its name, which compute something else."""

    name: str
    factor: float = dataclasses.field(compare=False)

    def __call__(self, x):
        return jnp.sin(x * self.factor)


@EAGER_AND_COMPILED
@on_worker0
def test_an_object_is_not_taken_for_an_equal_one(big_world, compiled):
    for factor in (2.0, 3.0):

        def loss(call, x):
            return call(1, Named("layer", factor), x)  # noqa: B023

        for derivative in (jax.grad, lambda f: jax.grad(jax.grad(f))):
            with jd.context():
                found = compiled(derivative(functools.partial(loss, sync)))(0.5)  # weakly typed
            assert_close(found, derivative(functools.partial(loss, serial))(0.5))
