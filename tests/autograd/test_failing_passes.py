"""Functions that fail in a pass: the error names all workers on its way, and the next pass works."""

import threading

import jax
import jax.numpy as jnp
import pytest
from helpers.data import assert_close
from helpers.programs import X, square, still_differentiates
from helpers.worlds import on_worker0, rank

import jdistgrad as jd


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
        with pytest.raises(OwnError, match="in") as caught:
            jax.grad(lambda x: down(path, name, x).sum())(X)
        assert caught.value.code == 41 + FAILING.index(name)
        told = [note.splitlines()[0] for note in caught.value.__notes__ if note.startswith("On ")]
        assert [line.split()[1] for line in told] == [f"worker{k}" for k in reversed(path)]
        assert all("test_failing_passes.down" in line for line in told)
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
            with pytest.raises(OwnError, match="in forward"):
                jax.grad(lambda x: call(rank(1), jnp.add, args=(broken, x)).sum())(X)  # noqa: B023
            with pytest.raises(OwnError, match="in forward"):
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
            with pytest.raises(OwnError, match="in"):
                jax.grad(through_remote)(X)
            still_differentiates()


@on_worker0
def test_an_error_in_compiled_code(world):
    with jd.context():
        with pytest.raises(jax.errors.JaxRuntimeError, match="in the pullback"):
            jax.block_until_ready(jax.jit(jax.grad(lambda x: down([rank(1)], "fails_backward", x).sum()))(X))
        still_differentiates()


def sometimes(x, fails):
    return fails_backward(x) if fails else x * 2


@on_worker0
def test_many_failures_then_success_in_one_context(big_world):
    run = lambda fails: jax.grad(lambda x: jd.rpc_sync(rank(1), sometimes, args=(x, fails)).sum())(X)  # noqa: E731
    with jd.context():
        for _ in range(20):
            with pytest.raises(OwnError, match="in the pullback"):
                run(True)
        for _ in range(20):
            assert_close(run(False), 2 * jnp.ones(3))


@on_worker0
def test_a_shape_error_in_the_callee(world):
    with jd.context():
        with pytest.raises(TypeError, match="shapes"):
            jax.grad(lambda x: jd.rpc_sync(rank(1), jnp.add, args=(x, jnp.ones(4))).sum())(X)
        still_differentiates()
