"""How many messages and contributions a backward pass has, and that sums are the same to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.worlds import last, on_worker0, rank

import jdistgrad as jd
from jdistgrad.autograd.tape.tape import Tape
from jdistgrad.rpc.worker import current_worker

X = jnp.arange(1.0, 4.0)


def product(x, y):
    return x * y


def shared(x):
    return jnp.sin(x)


def links_here(context):
    table = current_worker().scopes
    return table.find(context).content(Tape).all_links() if context in table.identifiers() else []


def crossings(ctx):
    """Return the source, target, function name and direction of every message of a context, on all workers."""
    found = [link for k in range(jd.world_size()) for link in jd.rpc_sync(k, links_here, args=(ctx.id,))]
    return [(link.source, link.target, link.what.split(".")[-1], link.backward) for link in found]


def pulls(ctx, function):
    return [(source, target) for source, target, what, backward in crossings(ctx) if backward and function in what]


@on_worker0
def test_an_unused_call_costs_no_backward_message(world):
    def loss(x):
        jd.rpc_sync(rank(1), product, args=(x, x))
        jd.remote(rank(2), product, args=(x, x)).to_here()
        jd.remote(rank(1), product, args=(x, x))
        return jnp.sum(jd.rpc_sync(rank(2), shared, args=(x,)))

    with jd.context() as ctx:
        assert_close(jax.grad(loss)(X), jnp.cos(X))
        assert pulls(ctx, "product") == []
        assert pulls(ctx, "shared") == [(0, rank(2))]
        assert sum(backward for *_, backward in crossings(ctx)) == 1


@on_worker0
def test_as_many_contributions_as_uses(world):
    rref = jd.remote(rank(1), shared, args=(X,))
    with jd.context():
        used = lambda p: sum(jd.rpc_sync(rank(k), product, args=(p, X)).sum() for k in range(5))  # noqa: E731
        gradient = jd.grad(lambda p: used(p) + p.to_here().sum())(rref)
        assert gradient.marks[0] == 6
        assert_close(gradient.to_here(), 5 * X + 1)


class passes:
    """The number of times that the derivative of ``watched`` has run in this process."""

    count = 0


@jax.custom_vjp
def watched(x):
    return x * 3


def count_pass(residuals, cotangent):
    passes.count += 1
    return (cotangent * 3,)


watched.defvjp(lambda x: (x * 3, None), count_pass)


def passes_here():
    return passes.count


def run_watched(x):
    return watched(x)


@pytest.mark.parametrize("uses", [0, 1, 5])
@on_worker0
def test_a_function_is_derived_once_however_often_it_is_used(world, uses):
    def loss(x):
        rref = jd.remote(rank(1), run_watched, args=(x,))
        return x.sum() + sum(jd.rpc_sync(rank(k), product, args=(rref, X)).sum() for k in range(uses))

    before = jd.rpc_sync(rank(1), passes_here)
    with jd.context():
        assert_close(jax.grad(loss)(X), 1 + 3 * uses * X)
    assert jd.rpc_sync(rank(1), passes_here) - before == min(uses, 1)


@on_worker0
def test_a_repeated_pullback_counts_once_for_references(world):
    # A second derivative runs the pullback again: its earlier contributions to owners must not be added twice.
    rref = jd.remote(rank(1), shared, args=(X,))
    with jd.context():
        inner = lambda p, x: jd.rpc_sync(rank(2), product, args=(p, x**2)).sum()  # noqa: E731
        jax.grad(lambda x: jax.grad(inner, argnums=1)(rref, x).sum())(X)
        gradient = jd.grad(inner)(rref, X)
        assert_close(gradient.to_here(), X**2)


def scaled(factor):
    return factor * X


def nested(factor):
    return {"w": [factor * X, jnp.full((2, 1 << 15), factor)], "b": jnp.bfloat16(factor), "name": "nested"}


def made(function, *factors):
    references = [jd.remote(last(), function, args=(factor,)) for factor in factors]
    for one in references:
        one.creation().result()
    return references


def messages_of(run, *names):
    """Return the number of messages with a stop of one of these names that are sent while ``run`` runs."""
    with jd.timeline() as recorded:
        run()
    return sum(any(name in one.name for name in names) for one in recorded.events if one.kind == "call")


@pytest.mark.parametrize(
    ("combine", "expected", "messages"),
    [(jnp.add, [jnp.ones(3), jnp.ones(3)], 1), (jnp.multiply, [3 * X, 2 * X], 2)],
    ids=["gradients go with the fetches", "gradients need the values"],
)
@on_worker0
def test_fetches_and_parts_of_gradients_share_messages(world, combine, expected, messages):
    a, b = made(scaled, 2.0, 3.0)
    step = jd.jit(jd.value_and_grad(lambda a, b: combine(a.to_here(), b.to_here()).sum(), (0, 1)))
    step.plan(a, b)
    with jd.context():
        results = []
        count = messages_of(lambda: results.append(step(a, b)), "the fetch of a reference", "a contribution")
        ((value, gradients),) = results
        assert_close(value, combine(2 * X, 3 * X).sum())
        assert_close([one.to_here() for one in gradients], expected)
    assert count == (0 if last() == 0 else messages)


@on_worker0
def test_values_of_any_kind_and_size(world):
    def loss(values):
        first, second = values
        return (first["w"][0] * second["w"][0]).sum() + (first["w"][1] ** 2).mean() + (first["b"] * second["b"]) ** 2

    a, b = made(nested, 2.0, 3.0)
    step = jd.jit(jd.value_and_grad(lambda a, b: loss((a.to_here(), b.to_here())), (0, 1)))
    for _ in range(2):
        with jd.context():
            value, gradients = step(a, b)
            local = [{key: one for key, one in nested(factor).items() if key != "name"} for factor in (2.0, 3.0)]
            expected, serial = jax.value_and_grad(loss)(local)
            assert_close(value, expected)
            found = [one.to_here() for one in gradients]
            assert_close([{key: one[key] for key in ("w", "b")} for one in found], serial)
            assert all(isinstance(leaf, jax.Array) for one in found for leaf in (*one["w"], one["b"]))


@on_worker0
def test_parts_that_are_missing_stay_missing(world):
    # Only one of the arrays in the value is used: the gradients of the others are zero.
    (a,) = made(nested, 2.0)
    step = jd.jit(jd.grad(lambda a: a.to_here()["w"][0].sum()))
    with jd.context():
        gradient = step(a).to_here()
        assert_close(gradient["w"][0], jnp.ones_like(X))
        assert not np.any(np.asarray(gradient["w"][1]))
        assert gradient["w"][1].shape == (2, 1 << 15)
