"""Bad input to derivatives: a clear error, nothing is lost, and the next pass works."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import rank, same

import jdistgrad as jd
from jdistgrad.rpc.current import current_worker

X = jnp.arange(1.0, 4.0)


def square(x):
    return x * x


def make():
    return jnp.ones(3)


def still_works():
    """In the context that is open, or else in one of its own."""
    same(jd.grad(lambda x: jd.rpc_sync(rank(1), square, args=(x,)).sum())(X), 2 * X)


def loss(x):
    return jd.rpc_sync(rank(1), square, args=(x,)).sum()


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (lambda x: jd.rpc_sync(rank(1), square, args=(x,)), r"must be a scalar, not float32\[3\]. Sum it"),
        (lambda x: jd.remote(rank(1), square, args=(x,)), r"must be local, not RRef\(.*to_here\(\)"),
        (lambda x: jnp.argmax(jd.rpc_sync(rank(1), square, args=(x,))), "must be a float, not int32"),
        (lambda x: "loss", "must be a scalar, not a str"),
        (lambda x: None, "must be a scalar, not a NoneType"),
    ],
)
def test_roots_that_cannot_be_differentiated(big_world, root, message):
    def body():
        with jd.context() as ctx:
            for differentiate in (jd.grad(root), functools.partial(jd.backward, ctx, root)):
                with pytest.raises(jd.DifferentiationError, match=message):
                    differentiate(X)
            still_works()

    big_world.drive(body)


def test_nothing_to_differentiate(world):
    def body():
        with jd.context() as ctx:
            with pytest.raises(jd.DifferentiationError, match="none of the arguments has"):
                jd.backward(ctx, lambda n: 1.0, 3)
            with pytest.raises(jd.DifferentiationError, match="no roots"):
                jd.backward(ctx, lambda x: [], X)
            with pytest.raises(jd.DifferentiationError, match=r"returns \(scalar, anything\), not"):
                jd.grad(jnp.sum, has_aux=True)(X)
            still_works()

    world.drive(body)


class Box:
    def __init__(self, value):
        self.value = value


def boxed(x):
    return Box(x * x)


@pytest.mark.parametrize("how", [lambda f: f, jd.jit], ids=["eager", "staged"])
def test_an_array_hidden_in_an_object_is_refused(big_world, how):
    """It would have no derivative, and nobody would notice."""

    def body():
        with jd.context():
            with pytest.raises((jd.DifferentiationError, jd.EncodingError), match=r"array inside|no data yet"):
                how(jd.grad(lambda x: jd.rpc_sync(rank(1), boxed, args=(x,)).value.sum()))(X)
            still_works()

    big_world.drive(body)


def test_a_closed_context_is_refused(world):
    def body():
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
        still_works()
        del gradient

    world.drive(body)


def test_a_context_this_worker_never_heard_of(big_world):
    def body():
        with jd.context() as ctx:
            pass
        with pytest.raises(jd.ContextError, match=r"no context 0:\d+ on this worker"):
            jd.rpc_sync(1, jd.get_gradients, args=(ctx.id + 1,))
        for use in (jd.get_gradients, lambda which: jd.backward(which, loss, X)):
            with pytest.raises(jd.ContextError, match="no context 0:12345 on this worker"):
                use(12345)
            with pytest.raises(TypeError, match="expected a context"):
                use("0:1")
        still_works()

    big_world.drive(body)


def test_backward_in_a_context_other_than_the_threads(world):
    def body():
        from jdistgrad.autograd.contexts import open_context

        other = open_context()
        with jd.context(), pytest.raises(jd.ContextError, match="this thread is in context 0:"):
            jd.backward(other, loss, X)
        same(jd.backward(other, loss, X)[1], (2 * X,))
        other.close()

    world.drive(body)


@pytest.mark.parametrize(
    ("cotangent", "error", "message"),
    [
        (jnp.ones(4), ValueError, r"float32\[4\].*float32\[3\]"),
        (jnp.ones(3, jnp.int32), ValueError, r"int32\[3\].*float32\[3\]"),
        ((jnp.ones(3), jnp.ones(3)), ValueError, "tree structure"),
    ],
)
def test_a_cotangent_that_does_not_fit(big_world, cotangent, error, message):
    def body():
        with jd.context():
            _, pullback = jax.vjp(lambda x: jd.rpc_sync(1, square, args=(x,)), X)
            with pytest.raises(error, match=message):
                pullback(cotangent)
            same(pullback(jnp.ones(3)), (2 * X,))
            still_works()

    big_world.drive(body)


class OwnError(Exception):
    """With a field, as one of a user's own."""

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
    """Through all workers of a path to a function."""
    if not path:
        return globals()[function_name](x)
    return jd.rpc_sync(path[0], down, args=(path[1:], function_name, x))


FAILING = ["fails_forward", "fails_recording", "fails_backward"]


@pytest.mark.parametrize("name", FAILING)
def test_an_error_names_the_chain_of_workers(world, name):
    def body():
        path = [rank(k) for k in (1, 2, 3)]
        with jd.context():
            with pytest.raises(OwnError, match="in") as caught:
                jax.grad(lambda x: down(path, name, x).sum())(X)
            assert caught.value.code == 41 + FAILING.index(name)
            told = [note.splitlines()[0] for note in caught.value.__notes__ if note.startswith("On ")]
            assert [line.split()[1] for line in told] == [f"worker{k}" for k in reversed(path)]
            assert all("test_gradient_errors.down" in line for line in told)
            assert ("the pullback of" in told[0]) == (name == "fails_backward")
            assert told[-1].endswith("called by worker0 (rank 0):")
            still_works()
        still_works()

    world.drive(body)


def test_an_argument_that_cannot_be_fetched(world):
    """Then the function does not run, and its value is never made."""

    def body():
        with jd.context():
            broken = jd.remote(rank(2), fails_forward, args=(X,))
            for call in (jd.rpc_sync, jd.remote):
                with pytest.raises(OwnError, match="in forward"):
                    jax.grad(lambda x: call(rank(1), jnp.add, args=(broken, x)).sum())(X)  # noqa: B023
                with pytest.raises(OwnError, match="in forward"):
                    jax.block_until_ready(call(rank(1), jnp.add, args=(broken, X)).to_here())
            still_works()

    world.drive(body)


@pytest.mark.parametrize("name", FAILING)
def test_an_error_behind_a_reference(world, name):
    def body():
        def through_remote(x):
            rref = jd.remote(rank(1), down, args=([rank(2)], name, x))
            return jd.rpc_sync(rank(3), square, args=(rref,)).sum()

        for _ in range(2):
            with jd.context():
                with pytest.raises(OwnError, match="in"):
                    jax.grad(through_remote)(X)
                still_works()

    world.drive(body)


def test_an_error_in_compiled_code(world):
    def body():
        with jd.context():
            with pytest.raises(jax.errors.JaxRuntimeError, match="in the pullback"):
                jax.block_until_ready(jax.jit(jax.grad(lambda x: down([rank(1)], "fails_backward", x).sum()))(X))
            still_works()

    world.drive(body)


def sometimes(x, fails):
    return fails_backward(x) if fails else x * 2


def test_many_failures_then_success_in_one_context(world):
    def body():
        run = lambda fails: jax.grad(lambda x: jd.rpc_sync(rank(1), sometimes, args=(x, fails)).sum())(X)  # noqa: E731
        with jd.context():
            for _ in range(20):
                with pytest.raises(OwnError, match="in the pullback"):
                    run(True)
            for _ in range(20):
                same(run(False), 2 * jnp.ones(3))

    world.drive(body)


def test_a_shape_error_in_the_callee(world):
    def body():
        with jd.context():
            with pytest.raises(TypeError, match="shapes"):
                jax.grad(lambda x: jd.rpc_sync(rank(1), jnp.add, args=(x, jnp.ones(4))).sum())(X)
            still_works()

    world.drive(body)


@pytest.mark.parametrize("differentiate", [jax.jacfwd, jax.hessian, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
def test_forward_mode_is_refused(big_world, differentiate):
    def body():
        with jd.context():
            with pytest.raises(jd.DifferentiationError, match=r"no forward-mode derivative.*jax\.jacrev\(jax\.jacrev"):
                differentiate(loss)(X)
            still_works()

    big_world.drive(body)


def test_references_cannot_be_batched(big_world):
    def body():
        with jd.context():
            with pytest.raises(jd.DifferentiationError, match="a reference is one value, not a batch"):
                jax.vmap(lambda x: jd.remote(1, square, args=(x,)).to_here())(jnp.ones((2, 3)))
            with pytest.raises(jd.DifferentiationError, match="publish cannot be batched"):
                jax.vmap(lambda x: jd.RRef(x).to_here())(jnp.ones((2, 3)))
            with pytest.raises(jd.DifferentiationError, match=r"inside jax\.jit.*has no data"):
                jax.jit(lambda x: jd.RRef(x).to_here())(X)
            still_works()

    big_world.drive(body)


def returns_what_it_likes(x):
    calls = current_worker().__dict__.setdefault("test_calls", [])
    calls.append(1)
    return (x,) if len(calls) == 1 else (x, x)


def test_a_structure_other_than_the_traced_one(big_world):
    def body():
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"returned 2 arrays; when it was traced, it returned 1"):
            jax.block_until_ready(jax.jit(lambda x: jd.rpc_sync(1, returns_what_it_likes, args=(x,))[0])(X))
        still_works()

    big_world.drive(body)


def test_a_reference_of_another_world(world):
    def main():
        jd.init()
        stale = jd.RRef(np.ones(3, np.float32)) if jd.worker_info().rank == 0 else None
        jd.shutdown()
        me = jd.init()
        if me.rank == 0:
            with pytest.raises(jd.StaleReferenceError, match="belongs to a world that has been shut down"):
                jd.grad(lambda p: jd.rpc_sync(rank(1), square, args=(p,)).sum())(stale)
            still_works()
        assert jd.shutdown() == []

    world.run(main)
