"""Programs that cannot be differentiated: a clear error, nothing is lost, and the next pass works."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.programs import X, square, still_differentiates
from helpers.worlds import on_worker0, rank
from jax.experimental import io_callback

import jdistgrad as jd
from jdistgrad.rpc.worker import current_worker


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (lambda x: jd.rpc_sync(rank(1), square, args=(x,)), r"must be a scalar, not float32\[3\]. Sum it"),
        (lambda x: jd.remote(rank(1), square, args=(x,)), r"must be local, not RRef\(.*to_here\(\)"),
        (lambda x: jnp.argmax(jd.rpc_sync(rank(1), square, args=(x,))), "must be a float, not int32"),
        (lambda x: len(jd.rpc_sync(rank(1), square, args=(x,))), "must be a float, not int"),
        (
            lambda x: jd.rpc_sync(rank(1), square, args=(x,)).sum() * 1j,
            r"must be real, not complex64\. Take its real part",
        ),
        (lambda x: "loss", "must be a scalar, not a str"),
        (lambda x: None, "must be a scalar, not a NoneType"),
    ],
)
@on_worker0
def test_roots_that_cannot_be_differentiated(big_world, root, message):
    with jd.context() as ctx:
        for differentiate in (jd.grad(root), functools.partial(jd.backward, ctx, root)):
            with pytest.raises(jd.DifferentiationError, match=message):
                differentiate(X)
        still_differentiates()


@pytest.mark.parametrize("derivative", [jd.grad, jd.value_and_grad])
def test_what_is_no_function_and_what_is_no_argument_are_told_at_once(derivative):
    with pytest.raises(TypeError, match=r"grad\(loss_fn\)\(params\).*this float does not know how it was computed"):
        derivative(1.5)
    for argnums in ("params", ("params",), 1.0, None):
        with pytest.raises(TypeError, match=r"argnums= is .*, expected the position of an argument"):
            derivative(jnp.sin, argnums)


@on_worker0
def test_nothing_to_differentiate(world):
    with jd.context() as ctx:
        with pytest.raises(jd.DifferentiationError, match="none of the arguments has"):
            jd.backward(ctx, lambda n: 1.0, 3)
        with pytest.raises(jd.DifferentiationError, match="no roots"):
            jd.backward(ctx, lambda x: [], X)
        with pytest.raises(jd.DifferentiationError, match=r"returns \(scalar, anything\), not"):
            jd.grad(jnp.sum, has_aux=True)(X)
        still_differentiates()


@pytest.mark.parametrize("staged", [jd.jit, jax.jit], ids=["jd.jit", "jax.jit"])
@on_worker0
def test_a_reference_that_a_staged_function_makes_is_not_differentiated(world, staged):
    loss = lambda p: jd.rpc_sync(rank(2), square, args=(p["x"],)).sum()  # noqa: E731
    step = lambda x: jd.grad(loss)({"x": jd.remote(rank(1), square, args=(x,))})  # noqa: E731
    with jd.context():
        assert_close(step(X)["x"].to_here(), 2 * X**2)
        with pytest.raises(
            jd.DifferentiationError, match=r"argument 0 of .*\['x'\] is a reference that .*remote makes"
        ):
            staged(step)(X)
        still_differentiates()


def wants_the_value(x):
    return x * float(x.sum())


def has_an_effect(x):
    io_callback(print, None, x)
    return x


@pytest.mark.parametrize("how", [jd.grad, lambda f: jd.jit(jd.grad(f)), lambda f: jax.vmap(jd.grad(f))])
@pytest.mark.parametrize(
    ("function", "what"),
    [
        (wants_the_value, r"wants_the_value cannot be traced: `return x \* float\(x.sum\(\)\)` .* needs the value"),
        (has_an_effect, r"has_an_effect cannot be traced: `io_callback\(print, None, x\)` .* calls Python"),
    ],
)
@on_worker0
def test_functions_that_cannot_be_traced(big_world, how, function, what):
    with jd.context():
        with pytest.raises(jd.DifferentiationError, match=what) as caught:
            how(lambda x: jd.rpc_sync(rank(1), function, args=(x,)).sum())(jnp.stack([X, X])[:, None])
        assert "\n" not in str(caught.value)
        (note,) = [one for one in caught.value.__notes__ if "called by" in one]
        assert function.__name__ in note
        assert "jdistgrad/autograd" not in note  # the frames begin with the user's
        still_differentiates()


class Box:
    def __init__(self, value):
        self.value = value


def boxed(x):
    return Box(x * x)


@pytest.mark.parametrize("how", [lambda f: f, jd.jit], ids=["eager", "staged"])
@on_worker0
def test_an_array_hidden_in_an_object_is_refused(big_world, how):
    # Without an error, the array's derivative would be missing unnoticed.
    with jd.context():
        with pytest.raises((jd.DifferentiationError, jd.EncodingError), match=r"array inside|no data yet"):
            how(jd.grad(lambda x: jd.rpc_sync(rank(1), boxed, args=(x,)).value.sum()))(X)
        still_differentiates()


@pytest.mark.parametrize(
    ("cotangent", "error", "message"),
    [
        (jnp.ones(4), ValueError, r"float32\[4\].*float32\[3\]"),
        (jnp.ones(3, jnp.int32), ValueError, r"int32\[3\].*float32\[3\]"),
        ((jnp.ones(3), jnp.ones(3)), ValueError, "tree structure"),
    ],
)
@on_worker0
def test_a_cotangent_that_does_not_fit(big_world, cotangent, error, message):
    with jd.context():
        _, pullback = jax.vjp(lambda x: jd.rpc_sync(1, square, args=(x,)), X)
        with pytest.raises(error, match=message):
            pullback(cotangent)
        assert_close(pullback(jnp.ones(3)), (2 * X,))
        still_differentiates()


@on_worker0
def test_references_cannot_be_batched(big_world):
    with jd.context():
        with pytest.raises(jd.DifferentiationError, match="a reference is one value, not a batch"):
            jax.vmap(lambda x: jd.remote(1, square, args=(x,)).to_here())(jnp.ones((2, 3)))
        with pytest.raises(jd.DifferentiationError, match="publish cannot be batched"):
            jax.vmap(lambda x: jd.RRef(x).to_here())(jnp.ones((2, 3)))
        with pytest.raises(jd.DifferentiationError, match=r"inside jax\.jit.*has no data"):
            jax.jit(lambda x: jd.RRef(x).to_here())(X)
        still_differentiates()


def returns_what_it_likes(x):
    calls = current_worker().__dict__.setdefault("test_calls", [])
    calls.append(1)
    return (x,) if len(calls) == 1 else (x, x)


@on_worker0
def test_a_structure_other_than_the_traced_one(big_world):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"returned 2 arrays; when it was traced, it returned 1"):
        jax.block_until_ready(jax.jit(lambda x: jd.rpc_sync(1, returns_what_it_likes, args=(x,))[0])(X))
    still_differentiates()


def makes_a_reference(x):
    return jd.RRef(2 * x)


def makes_a_reference_elsewhere(x):
    return jd.remote(rank(2), jnp.sin, args=(x,))


@pytest.mark.parametrize(
    ("function", "same"),
    [(makes_a_reference, lambda x: 2 * x), (makes_a_reference_elsewhere, jnp.sin)],
    ids=["here", "elsewhere"],
)
@on_worker0
def test_a_function_that_would_make_another_reference_when_it_runs_again(big_world, function, same):
    def loss(x):
        return jnp.sum(jd.rpc_sync(rank(1), function, args=(x,)).to_here() ** 3)

    with jd.context():
        assert_close(jax.grad(loss)(X), jax.grad(lambda x: jnp.sum(same(x) ** 3))(X))
        with pytest.raises(jd.DifferentiationError, match=r"makes_a_ref\w+ returns a reference that it makes itself"):
            jax.jacrev(jax.grad(loss))(X)
    still_differentiates()


def otherwise_when_traced(x, n):
    return x if isinstance(x, jax.core.Tracer) else (x.sum(), x.astype(np.int32))[n]


@pytest.mark.parametrize(("n", "found"), [(0, r"float32\[\]"), (1, r"int32\[3\]")], ids=["shape", "dtype"])
@pytest.mark.parametrize("jit", [jax.jit, jd.jit], ids=["jax.jit", "jd.jit"])
@on_worker0
def test_results_are_those_that_the_trace_has_promised(big_world, jit, n, found):
    # The number would fill the whole array without an error.
    call = jit(lambda x: jd.rpc_sync(rank(1), otherwise_when_traced, args=(x, n)))
    with pytest.raises(Exception, match=rf"returned {found}; when it was traced, .* it returned float32\[3\]"):
        call(X)


@on_worker0
def test_more_bits_than_the_callee_has_are_refused_in_compiled_code_too(big_world):
    with jax.enable_x64(True):  # on this thread only
        x = jnp.arange(3, dtype=jnp.float64)
        with pytest.raises(Exception, match="a float64 array arrived on a worker whose JAX makes it float32"):
            jax.jit(lambda x: jd.rpc_sync(rank(1), square, args=(x,)))(x)
