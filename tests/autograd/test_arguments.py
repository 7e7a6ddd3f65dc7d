"""Gradients of remote calls, as those of the serial program: all kinds of arguments and results, every way to call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close, sum_squares
from helpers.programs import (
    assert_same_gradients,
    eventually,
    fast_layer,
    fast_product,
    fetched,
    handed_on,
    layer,
    parameters,
    product,
    serial,
    sync,
    vector,
)
from helpers.worlds import on_worker0, rank
from jax.experimental import sparse

import jdistgrad as jd


def mixed(count, flags, x, z, half, *, label):
    kept = jnp.where(flags, x, 0.0) * count
    return {"real": kept, "complex": z * kept.sum(), "half": half * half, "count": count + 1, label: jnp.flip(flags)}


@on_worker0
def test_arguments_of_every_dtype(big_world):
    args = (
        jnp.int32(3),
        jnp.array([True, False, True]),
        vector(3),
        jnp.complex64(vector(2) + 1j * vector(2, 5)),
        jnp.bfloat16(vector(4, 6)),
    )
    assert_same_gradients(lambda call, *args: call(1, mixed, *args, label="flags"), *args)


def holomorphic(z):
    return z**2 + jnp.exp(z)


@on_worker0
def test_complex_derivatives(big_world):
    z = jnp.complex64(0.5 + 1.5j)
    with jd.context():
        found = jax.grad(lambda z: jd.rpc_sync(rank(1), holomorphic, args=(z,)), holomorphic=True)(z)
        size = jax.grad(lambda z: jnp.abs(jd.rpc_sync(rank(1), holomorphic, args=(z,))) ** 2)(z)
    assert_close(found, 2 * z + jnp.exp(z))
    assert_close(size, jax.grad(lambda z: jnp.abs(holomorphic(z)) ** 2)(z))


@on_worker0
def test_only_some_arguments_are_differentiated(big_world):
    for program in (
        lambda call, x: call(1, product, x, np.float32(2.5)),
        lambda call, x: call(1, fast_product, 0.5, x),
        lambda call, x: call(1, layer, {"w": x, "b": np.ones(2, np.float32)}, np.ones((1, 3), np.float32)),
        lambda call, x: call(1, layer, params={"b": x[0], "w": jnp.ones((3, 2))}, x=jnp.ones((1, 3)), scale=x.sum()),
    ):
        assert_same_gradients(program, vector((3, 2)))


def weighted(tree, *, weights, name):
    assert name == "by name"
    return jax.tree.map(lambda leaf: leaf * weights["w"] ** 2, tree)


@on_worker0
def test_keyword_arguments_and_trees_with_holes(big_world):
    def program(call, tree, w):
        return call(1, weighted, tree, weights={"w": w, "unused": None}, name="by name")

    assert_same_gradients(program, {"z": vector(2), "a": [vector((2, 1), 3), None, ()]}, vector((), 4))


def several(x):
    return jnp.sin(x), jnp.cos(x), {"unused": jnp.exp(x), "index": jnp.argmax(x)}


@pytest.mark.parametrize("way", [sync, handed_on])
@on_worker0
def test_unused_outputs(big_world, way):
    for used in (0, 1):
        assert_same_gradients(lambda call, x, used=used: call(1, several, x)[used] * 2, vector(3), call=way)
    assert_same_gradients(lambda call, x: x * call(1, several, x)[2]["index"], vector(3), call=way)


def root_and_sine(x):
    return jnp.sqrt(x), jnp.sin(x)


fast_root_and_sine = jax.jit(root_and_sine)


@pytest.mark.parametrize("function", [root_and_sine, fast_root_and_sine], ids=["as_written", "jitted"])
@on_worker0
def test_an_unused_output_that_has_no_derivative_there(big_world, function):
    # The derivative of sqrt is infinite at zero, and zero times infinity is NaN: a result without a cotangent must be
    # left out of the pullback, not get a cotangent of zeros.
    x = jnp.array([0.0, 1.0, 4.0])
    for way in (sync, fetched):
        assert_same_gradients(lambda call, x: call(1, function, x)[1] * 2, x, call=way)


def constant(x):
    return jnp.arange(3.0) + jnp.zeros_like(x)


def nothing(x):
    return None


@on_worker0
def test_results_that_do_not_depend_on_arguments(big_world):
    assert_same_gradients(lambda call, x: call(1, constant, x) * x, vector(3))
    assert_same_gradients(lambda call, x: (call(1, nothing, x), x * 2), vector(3))


@functools.partial(jax.jit, static_argnums=(-1,), static_argnames=("scale",))
def with_settings(x, y, between, *, scale, shift=0.5):
    low, high = between
    if scale > 1:  # only where JAX does not trace it
        x = x**3 * scale
    return jnp.clip(x * y, low, high) + shift


def twice_differentiated(f):
    return jax.jacfwd(jax.grad(lambda x: jnp.sum(f(x))))


def over_a_batch(f):
    return lambda x: jax.vmap(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(jnp.stack([x, 2 * x]))


@pytest.mark.parametrize("stage", [lambda f: f, jax.jit, jd.jit], ids=["eager", "jax.jit", "jd.jit"])
@pytest.mark.parametrize("derivative", [twice_differentiated, over_a_batch])
@on_worker0
def test_static_arguments_that_are_floats(big_world, derivative, stage):
    x = vector(3)
    for scale, between in ((2.5, (-1.0, 1e9)), (3, (-2, 2.5)), (True, (0.0, np.float32(9)))):

        def program(call, x):
            return call(1, with_settings, x, jnp.sin(x), between, scale=scale, shift=0.25)  # noqa: B023

        with jd.context():
            found = stage(derivative(functools.partial(program, sync)))(x)
        assert_close(found, derivative(functools.partial(program, serial))(x), rtol=1e-4)


def empty_and_wide(x, empty):
    return jnp.concatenate([x, empty, x * 2])


@on_worker0
def test_empty_arrays(big_world):
    assert_same_gradients(lambda call, x, empty: call(1, empty_and_wide, x, empty), vector(3), vector(0))


@on_worker0
def test_many_leaves(big_world):
    tree = {f"leaf{k}": [vector((k % 5, 2), k), {"deep": vector((), k)}] for k in range(40)}
    assert_same_gradients(
        lambda call, tree, w: call(1, weighted, tree, weights={"w": w}, name="by name"), tree, vector(())
    )


@on_worker0
def test_argnums_and_aux(big_world):
    def loss(call):
        def run(x, y, params):
            out = call(1, layer, params, x, scale=y)
            return sum_squares(out), {"kept": out["h"] * 2}

        return run

    args = (vector((2, 3)), jnp.float32(1.5), parameters(3, 2))
    for argnums in (0, np.int64(2), (0, 1), (2, 1, 0)):
        found = jd.value_and_grad(loss(sync), argnums=argnums, has_aux=True)(*args)
        assert_close(found, jax.value_and_grad(loss(serial), argnums, has_aux=True)(*args))
    assert_close(jd.grad(loss(sync), has_aux=True)(*args), jax.grad(loss(serial), has_aux=True)(*args))


@jax.tree_util.register_pytree_node_class
class ByType:
    """A container that takes only arrays for its children, as those of distrax do."""

    def __init__(self, content):
        self.content = content

    def tree_flatten(self):
        return ([self.content], None) if isinstance(self.content, jax.Array) else ([], self.content)

    @classmethod
    def tree_unflatten(cls, setting, children):
        return cls(*children or [setting])


def squared(container):
    return container.content**2


def contained(x):
    return ByType(x)


@pytest.mark.parametrize("stage", [lambda f: f, jax.jit, jd.jit], ids=["eager", "jax.jit", "jd.jit"])
@on_worker0
def test_a_container_that_loses_its_arrays_is_named(big_world, stage):
    assert_close(jd.rpc_sync(rank(1), squared, args=(ByType(vector(3)),)), vector(3) ** 2)
    losses = [lambda x: sync(1, squared, ByType(x)).sum(), lambda x: sync(2, contained, x).content.sum()]
    for loss in losses:
        with jd.context(), pytest.raises(Exception, match=r"test_arguments\.ByType cannot be rebuilt"):
            stage(jd.grad(loss))(vector(3))


def applied(matrix, x):
    return matrix @ x


@on_worker0
def test_sparse_arrays(big_world):
    indices = jnp.array([[0, 1], [2, 3], [2, 0]])

    def program(call, data, x):
        return call(1, applied, sparse.BCOO((data, indices), shape=(3, 4)), x)

    assert_same_gradients(program, vector(3), vector(4))


@pytest.mark.parametrize(
    ("way", "function"),
    [(sync, layer), (eventually, fast_layer), (handed_on, fast_layer)],
)
@on_worker0
def test_every_way_to_call_every_worker(big_world, way, function):
    for to in range(jd.world_size()):

        def program(call, params, x, to=to):
            return call(to, function, params, x, scale=2.5)

        assert_same_gradients(program, parameters(3, 2, to), vector((4, 3), to), call=way)


@pytest.fixture
def nothing_compiled():
    """Let JAX run all code as it is written, on all workers, as somebody does who looks for an error."""
    jax.config.update("jax_disable_jit", True)
    yield
    jax.config.update("jax_disable_jit", False)


@on_worker0
def test_nothing_needs_to_be_compiled(big_world, nothing_compiled):
    assert_same_gradients(lambda call, params, x: call(1, fast_layer, params, x)["h"], parameters(3, 4), vector((2, 3)))


def innermost(x, y):
    return x * jnp.sum(y**2)


def through_remote(x):
    rref = jd.remote(rank(2), innermost, args=(x, x[1:]))
    return jd.rpc_sync(rank(0), innermost, args=(rref, x)) * rref.to_here()


def through_remote_serially(x):
    inner = innermost(x, x[1:])
    return innermost(inner, x) * inner


@on_worker0
def test_a_callee_that_makes_references_of_its_own(big_world):
    with jd.context():
        found = jax.jacrev(lambda x: jd.rpc_sync(rank(1), through_remote, args=(x,)))(vector(3))
    assert_close(found, jax.jacrev(through_remote_serially)(vector(3)))


def later(x):
    return jd.rpc_async(rank(2), innermost, args=(jnp.sin(x), x[:2]))


def of_its_value(x):
    return x * 2


@pytest.mark.parametrize("stage", [lambda f: f, jd.jit], ids=["eager", "jd.jit"])
@on_worker0
def test_a_function_that_answers_with_a_future(world, stage):
    serially = lambda x: 2 * innermost(jnp.sin(x), x[:2])  # noqa: E731
    by_value = lambda x: 2 * jd.rpc_sync(rank(1), later, args=(x,))  # noqa: E731
    by_reference = lambda x: jd.rpc_sync(rank(2), of_its_value, args=(jd.remote(rank(1), later, args=(x,)),))  # noqa: E731
    x = vector(3)
    with jd.context():
        for program in (by_value, by_reference):
            assert_close(stage(program)(x), serially(x))
            assert_close(stage(jax.jacrev(program))(x), jax.jacrev(serially)(x))
        assert_close(stage(jax.vmap(by_value))(vector((4, 3))), jax.vmap(serially)(vector((4, 3))))
