"""Programs that cannot be differentiated or fail: a clear error, nothing is lost, and the next pass works."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.programs import X, square, still_differentiates
from helpers.worlds import on_worker0, rank
from jax.experimental import io_callback

import jdistgrad as jd


@pytest.mark.parametrize(
    "root",
    [
        lambda x: jd.rpc_sync(rank(1), square, args=(x,)),
        lambda x: jd.remote(rank(1), square, args=(x,)),
        lambda x: jnp.argmax(jd.rpc_sync(rank(1), square, args=(x,))),
        lambda x: jd.rpc_sync(rank(1), square, args=(x,)).sum() * 1j,
        lambda x: "loss",
    ],
    ids=["array", "reference", "integer", "complex", "str"],
)
@on_worker0
def test_roots_that_cannot_be_differentiated(big_world, root):
    with jd.context() as ctx:
        for differentiate in (jd.grad(root), functools.partial(jd.backward, ctx, root)):
            with pytest.raises(jd.DifferentiationError):
                differentiate(X)
        still_differentiates()


@pytest.mark.parametrize("derivative", [jd.grad, jd.value_and_grad])
def test_what_is_no_function_is_told_at_once(derivative):
    with pytest.raises(TypeError, match=r"grad\(loss_fn\)\(params\).*this float has no record of its computation"):
        derivative(1.5)


@on_worker0
def test_nothing_to_differentiate(world):
    with jd.context() as ctx:
        with pytest.raises(jd.DifferentiationError):
            jd.backward(ctx, lambda n: 1.0, 3)
        with pytest.raises(jd.DifferentiationError):
            jd.backward(ctx, lambda x: [], X)
        still_differentiates()


def wants_the_value(x):
    return x * float(x.sum())


def has_an_effect(x):
    io_callback(print, None, x)
    return x


@pytest.mark.parametrize("how", [jd.grad, lambda f: jd.jit(jd.grad(f))])
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


@on_worker0
def test_references_cannot_be_batched(big_world):
    with jd.context():
        with pytest.raises(jd.DifferentiationError):
            jax.vmap(lambda x: jd.remote(1, square, args=(x,)).to_here())(jnp.ones((2, 3)))
        with pytest.raises(jd.DifferentiationError):
            jax.vmap(lambda x: jd.RRef(x).to_here())(jnp.ones((2, 3)))
        with pytest.raises(jd.DifferentiationError):
            jax.jit(lambda x: jd.RRef(x).to_here())(X)
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
        with pytest.raises(jd.DifferentiationError):
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


class OwnError(Exception):
    """An exception with an extra field, as users define them."""

    def __init__(self, message, code):
        super().__init__(message, code)
        self.code = code


def fails_forward(x):
    raise OwnError("in forward", 41)


@jax.custom_vjp
def fails_backward(x):
    return x * 2


def refuse(residuals, cotangent):
    raise OwnError("in the pullback", 43)


fails_backward.defvjp(lambda x: (x * 2, None), refuse)


def fails_recording(x):
    if isinstance(x, jax.core.Tracer):
        raise OwnError("in recording", 42)
    return x


def down(path, function_name, x):
    """Call a function through all workers of a path."""
    if not path:
        return globals()[function_name](x)
    return jd.rpc_sync(path[0], down, args=(path[1:], function_name, x))


LET_GO = threading.Event()


def let_go():
    LET_GO.set()


@jax.custom_vjp
def held_backward(x):
    return x * 2


def hold(residuals, cotangent):
    assert LET_GO.wait(20)
    LET_GO.clear()
    return (cotangent,)


held_backward.defvjp(lambda x: (x * 2, None), hold)


def run_held(x):
    return held_backward(x)


@pytest.mark.parametrize(
    ("compiled", "twice"),
    [(lambda f: f, False), (lambda f: f, True), (jd.jit, False)],
    ids=["eager", "second", "jd.jit"],
)
@on_worker0
def test_the_time_of_a_call_is_that_of_its_pullback(world, compiled, twice):
    # The pullback gets the call's timeout twice, since it may first have to wait for the call itself.

    def loss(x):
        return (jd.rpc_sync(rank(1), run_held, args=(x,), timeout=1.0) ** 2).sum()

    derivative = jax.grad(lambda x: (jax.grad(loss)(x) * X).sum()) if twice else jax.grad(loss)
    with jd.context(), pytest.raises(jd.CallTimeoutError, match=r"the pullback of .*run_held.* within [24] s"):
        compiled(derivative)(X)
    jd.rpc_sync(rank(1), let_go)
    still_differentiates()


FAILING = ["fails_forward", "fails_recording", "fails_backward"]


@pytest.mark.parametrize("name", FAILING)
@on_worker0
def test_an_error_names_the_chain_of_workers(world, name):
    path = [rank(k) for k in (1, 2, 3)]
    with jd.context():
        with pytest.raises(OwnError) as caught:
            jax.grad(lambda x: down(path, name, x).sum())(X)
        assert caught.value.code == 41 + FAILING.index(name)
        told = [note.splitlines()[0] for note in caught.value.__notes__ if note.startswith("On ")]
        assert [line.split()[1] for line in told] == [f"worker{k}" for k in reversed(path)]
        assert all("test_gradient_errors.down" in line for line in told)
        assert ("the pullback of" in told[0]) == (name == "fails_backward")
        assert told[-1].endswith("called by worker0 (rank 0):")
        still_differentiates()
    still_differentiates()


@on_worker0
def test_an_argument_that_cannot_be_fetched(world):
    # If an argument cannot be fetched, the function does not run and no value is made.
    with jd.context():
        broken = jd.remote(rank(2), fails_forward, args=(X,))
        for call in (jd.rpc_sync, jd.remote):
            with pytest.raises(OwnError):
                jax.grad(lambda x: call(rank(1), jnp.add, args=(broken, x)).sum())(X)  # noqa: B023
            with pytest.raises(OwnError):
                jax.block_until_ready(call(rank(1), jnp.add, args=(broken, X)).to_here())
        still_differentiates()


@pytest.mark.parametrize("name", FAILING)
@on_worker0
def test_an_error_behind_a_reference(world, name):
    def through_remote(x):
        rref = jd.remote(rank(1), down, args=([rank(2)], name, x))
        return jd.rpc_sync(rank(3), square, args=(rref,)).sum()

    for _ in range(2):
        with jd.context():
            with pytest.raises(OwnError):
                jax.grad(through_remote)(X)
            still_differentiates()


@on_worker0
def test_an_error_in_compiled_code(world):
    with jd.context():
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(jax.jit(jax.grad(lambda x: down([rank(1)], "fails_backward", x).sum()))(X))
        still_differentiates()
