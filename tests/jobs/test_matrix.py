"""The table of docs/matrix.md: each cell is a program that gives the serial result, or the error that the cell says."""

import contextlib
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from helpers.data import assert_close
from jax.sharding import PartitionSpec as P

import jdistgrad as jd
from jdistgrad.autograd.contexts import current_scope

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "matrix.md").read_text()
X, WEIGHTS = jnp.array([0.3, -0.5, 0.9]), jnp.array([1.0, 2.0, 0.5])
JAX_ERRORS = (TypeError, ValueError, NotImplementedError)
ERRORS = {"D": jd.DifferentiationError, "C": jd.CollectiveError, "J": JAX_ERRORS}


def rows(x):
    return jnp.stack([x, 2 * x, x - 1])


def with_rule(f):
    """Scale the derivative by 3, before the pull."""
    ruled = jax.custom_vjp(f)
    ruled.defvjp(lambda x: jax.vjp(f, x), lambda pull, cotangent: pull(3 * cotangent))
    return ruled


def with_late_rule(f):
    ruled = jax.custom_vjp(f)
    ruled.defvjp(lambda x: jax.vjp(f, x), lambda pull, ct: jax.tree.map(lambda leaf: leaf + leaf, pull(ct)))
    return ruled


def with_jvp(f):
    ruled = jax.custom_jvp(f)
    ruled.defjvp(lambda x, t: (f(*x), 3 * jax.jvp(f, x, t)[1]))
    return ruled


def sharded(f):
    mesh = jax.make_mesh((3,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
    return jax.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=P("d"), out_specs=P("d"))


def looped(f, x):
    return jax.lax.while_loop(lambda at: at[0] < 3, lambda at: (at[0] + 1, at[1] * 0.5 + f(at[1])), (0, x))[1]


def scanned(f):
    return lambda x: jax.lax.scan(lambda total, row: (total * 0.5 + f(row), None), 0.0, rows(x))[0]


TRANSFORMED = {
    "jax.grad": jax.grad,
    "jax.jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "jax.vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(2)),
    "jax.linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.cos(x)),
    "jax.hessian": jax.hessian,
    "jax.jit": lambda f: jax.jit(jax.value_and_grad(f)),
    "jax.vmap": lambda f: lambda x: jax.vmap(jax.value_and_grad(f))(rows(x)),
    "lax.scan": lambda f: jax.value_and_grad(scanned(f)),
    "lax.cond": lambda f: jax.value_and_grad(lambda x: jax.lax.cond(x[0] > 0, f, lambda x: 0.0 * x[0], x)),
    "lax.while_loop": lambda f: lambda x: jax.jvp(lambda x: looped(f, x), (x,), (x,)),
    "jax.checkpoint": lambda f: jax.value_and_grad(jax.checkpoint(f)),
    "jax.custom_vjp": lambda f: jax.value_and_grad(with_rule(f)),
    "jax.custom_jvp": lambda f: jax.value_and_grad(with_jvp(f)),
    "jax.shard_map": lambda f: jax.jit(jax.value_and_grad(lambda x: jnp.sum(sharded(f)(rows(x))))),
    "jax.pmap": lambda f: lambda x: jax.pmap(jax.value_and_grad(f))(rows(x)),
    "jd.jit": lambda f: jd.jit(jax.value_and_grad(f)),
}


def times(f, ks):  # what maps over a reference closes over it
    return lambda map_: lambda p: jnp.sum(map_(lambda k: k * f(p))(ks))


def kept(pulled, p):
    """Return a gradient: that of a reference is in the context, on the owner."""
    return jd.on(p.owner, gradient_here)(current_scope().id) if isinstance(p, jd.RRef) else pulled


def gradient_here(context):
    return next(iter(jd.get_gradients(context).values()))


OF_REFERENCES = {
    "jax.grad": jd.grad,
    "jax.jvp": lambda f: lambda p: jax.jvp(f, (p,), (p,)),
    "jax.vjp": lambda f: lambda p: kept(jax.vjp(f, p)[1](jnp.float32(1)), p),
    "jax.linearize": lambda f: lambda p: jax.linearize(f, p)[1](p),
    "jax.hessian": jax.hessian,
    "jax.jit": lambda f: jax.jit(jd.value_and_grad(f)),
    "jax.vmap": lambda f: jd.value_and_grad(times(f, jnp.arange(3.0))(jax.vmap)),
    "lax.scan": lambda f: jd.value_and_grad(times(f, jnp.arange(3.0))(lambda g: lambda ks: jax.lax.map(g, ks))),
    "lax.cond": lambda f: jd.value_and_grad(lambda p: jax.lax.cond(WEIGHTS[0] > 0, f, lambda p: 0.0, p)),
    "lax.while_loop": lambda f: jd.grad(lambda p: looped(lambda x: x * f(p), 1.0)),
    "jax.checkpoint": lambda f: jd.value_and_grad(jax.checkpoint(f)),
    "jax.custom_vjp": lambda f: jd.value_and_grad(with_rule(f)),
    "jax.custom_jvp": lambda f: jd.value_and_grad(with_jvp(f)),
    "jax.shard_map": lambda f: jd.value_and_grad(times(f, jnp.arange(3.0)[:, None])(lambda g: jax.jit(sharded(g)))),
    "jax.pmap": lambda f: jd.value_and_grad(times(f, jnp.arange(3.0))(jax.pmap)),
    "jd.jit": lambda f: jd.jit(jd.value_and_grad(f)),
}


@jax.jit
def product(p, x):
    return jnp.tanh(p * x) * jnp.arange(1.0, 4.0)


def total(call, p):
    return lambda x: jnp.sum(call(p, x)) + jnp.sum(call(p, x) ** 2)


def of_weights(p):
    return jnp.sum(jd.on(1, product)(p, X))


def call(p, x):
    return jd.on(1, product)(p, x)


def module_loss(module):
    return lambda x: jnp.sum(jnp.tanh(module(x)))


def dense(x):
    return nn.Dense(2).apply(nn.Dense(2).init(jax.random.key(0), X), x)


def around_step(p):
    pipeline = jd.Pipeline([(product, jd.put(k, p)) for k in range(3)], jd.pipeline.gpipe(3, 1), loss=loss_of)
    return lambda x: pipeline.step(x[None], targets=x[None])


def loss_of(outputs, targets):
    return jnp.sum(outputs)


def in_a_stage(transform):
    def stage(p, x):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(transform(total(product, p))(x[0])))[None]

    stages = [product, product, stage]
    pipeline = jd.Pipeline(
        [(f, jd.put(k, WEIGHTS)) for k, f in enumerate(stages)], jd.pipeline.gpipe(3, 1), loss=loss_of
    )
    found = pipeline.step(X[None], targets=X[None])
    assert_close(found, stage(WEIGHTS, product(WEIGHTS, product(WEIGHTS, X[None])))[0], rtol=1e-4, atol=1e-5)


def over_ranks(x):
    return jnp.sum(jd.collectives.of_this_world().allreduce(x) ** 2)


def over_a_mesh(x):
    return jnp.sum(jd.collectives.Mesh("d").allreduce(x) ** 2)


def on_all_ranks(transform):
    if transform is TRANSFORMED["jax.shard_map"]:
        found = jax.jit(sharded(over_a_mesh))(rows(X))
        assert_close(found, jnp.full(3, jnp.sum(jnp.sum(rows(X), 0) ** 2)), rtol=1e-4, atol=1e-5)
    else:
        equal(transform(over_ranks)(X), transform(lambda x: jnp.sum((3 * x) ** 2))(X))


def equal(found, expected):
    for one, other in itertools.zip_longest(*map(jax.tree.leaves, (found, expected))):
        assert_close(one, other, rtol=1e-4, atol=1e-5)


def fetched(tree):
    is_gradient = lambda leaf: hasattr(leaf, "to_here")  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.to_here() if is_gradient(leaf) else leaf, tree, is_leaf=is_gradient)


def of_reference(row):
    transform = OF_REFERENCES[row]
    equal(fetched(transform(of_weights)(jd.put(2, WEIGHTS))), transform(lambda p: jnp.sum(product(p, X)))(WEIGHTS))


def run_cell(row, column):
    transform = TRANSFORMED[row]
    match column:
        case "calls":
            equal(transform(total(call, WEIGHTS))(X), transform(total(product, WEIGHTS))(X))
        case "references":
            equal(transform(total(call, jd.put(2, WEIGHTS)))(X), transform(total(product, WEIGHTS))(X))
        case "gradients of references":
            of_reference(row)
        case "modules":
            module = jd.RemoteModule(1, nn.Dense(2), (X,), rng=0)
            equal(transform(module_loss(module))(X), transform(module_loss(dense))(X))
        case "in a stage":
            in_a_stage(transform)


def on_all(body):
    """Run a body on every worker; an error is that of worker 0."""
    outcomes = jd.on(None, caught)(body)
    if outcomes[0] is not None:
        raise outcomes[0]


def caught(body):
    try:
        body()
    except Exception as error:
        return error
    return None


def cells():
    header, _, *lines = [line.strip("| \n").split(" | ") for line in PAGE.splitlines() if line.startswith("|")]
    for name, *claims in lines:
        for column, claim in zip(header, claims, strict=True):
            yield name.strip("`"), column, claim


LIMITS = {
    1: lambda p: jax.grad(of_weights)(p).to_here(),
    2: lambda p: jax.vmap(of_weights)(p),
    3: lambda p: jax.lax.scan(lambda total, p: (total + of_weights(p), None), 0.0, p),
    4: lambda p: jax.grad(lambda x: looped(lambda x: jnp.sum(call(p, x * X)), x))(1.0),
    5: lambda p: jd.grad(with_late_rule(of_weights))(p).to_here(),
    6: lambda p: sharded(lambda x: jnp.sum(x * p.to_here()))(rows(X)),
    7: lambda p: jax.jit(sharded(over_ranks))(rows(X)),
}


@pytest.mark.parametrize(("row", "column", "claim"), list(cells()))
def test_a_cell_is_true(row, column, claim):
    body = lambda: run_cell(row, column)  # noqa: E731
    with jd.local_workers(3):
        if column == "collectives of ranks":
            body = lambda: on_all(lambda: on_all_ranks(TRANSFORMED[row]))  # noqa: E731
        expected = (
            contextlib.nullcontext() if claim.startswith("yes") else pytest.raises(ERRORS[claim.removeprefix("no ")])
        )
        with expected, jd.context() if column != "collectives of ranks" else contextlib.nullcontext():
            body()


@pytest.mark.parametrize("number", LIMITS)
def test_a_limit_is_one(number):
    with jd.local_workers(3), jd.context():
        reference = jd.put(2, WEIGHTS)
        with pytest.raises((*JAX_ERRORS, jd.CollectiveError)):
            LIMITS[number](reference)


def test_every_limit_is_tried():
    numbers = {int(number) for _, _, claim in cells() for number in re.findall(r"\d", claim)}
    assert numbers == set(LIMITS) == {int(number) for number in re.findall(r"^(\d)\. ", PAGE, re.MULTILINE)}


@pytest.mark.parametrize("row", TRANSFORMED)
def test_a_step_of_a_pipeline_is_not_transformed(row):
    with jd.local_workers(3), jd.context(), pytest.raises(jd.DifferentiationError):
        TRANSFORMED[row](around_step(WEIGHTS))(X)
