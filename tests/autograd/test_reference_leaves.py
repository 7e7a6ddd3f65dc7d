"""The leaf of a reference is no number: what users do with leaves of trees is right for references, or an error."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.programs import parameters
from helpers.worlds import on_worker0, rank

import jdistgrad as jd

X = np.arange(3, dtype="f")


def apply(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def leaves(tree):
    return jax.tree.leaves(tree)


def of_leaves(function):
    """Return what a function makes of each leaf of a tree, as a tree."""
    return lambda tree: jax.tree.map(function, tree)


def chosen_leaf(tree):
    return jax.lax.cond(jnp.ones(()) > 0, lambda t: t, lambda t: t, tree)


def scanned(tree):
    return jax.lax.scan(lambda carry, _: (carry, None), tree, None, length=2)[0]


def alike(tree):
    @jax.custom_vjp
    def identity(tree):
        return tree

    identity.defvjp(lambda tree: (tree, None), lambda _, cotangent: (cotangent,))
    return identity(tree)


# What each returns for a tree of arrays is what it must return for a reference to the tree, a module or a gradient.
IDIOMS = {
    "sum of squares": lambda t: sum(jnp.sum(p**2) for p in leaves(t)),
    "optax.tree.norm": optax.tree.norm,
    "ravel_pytree": lambda t: jax.flatten_util.ravel_pytree(t)[0],
    "scaled": of_leaves(lambda a: 0.5 * a),
    "jnp.copy": of_leaves(jnp.copy),
    "jnp.add of itself": lambda t: jax.tree.map(jnp.add, t, t),
    "jnp.asarray": of_leaves(jnp.asarray),
    "jnp.zeros_like": of_leaves(jnp.zeros_like),
    "jax.device_put": of_leaves(jax.device_put),
    "jnp.where of itself": of_leaves(lambda a: jnp.where(False, a, a)),
    "indexed": lambda t: leaves(t)[0][0],
    "comparison": lambda t: [jnp.all(a == a) for a in leaves(t)],
    "len": lambda t: len(leaves(t)[0]),
    "shape": lambda t: [p.shape for p in leaves(t)],
    "size": lambda t: sum(p.size for p in leaves(t)),
    "jax.eval_shape": lambda t: [jnp.zeros(one.shape) for one in leaves(jax.eval_shape(lambda t: t, t))],
    "dtype": lambda t: [jnp.zeros((), p.dtype) for p in leaves(t)],
    "float": lambda t: float(leaves(t)[0].ravel()[0]) if not isinstance(leaves(t)[0], jax.core.Tracer) else len(1),
    "optax.apply_updates": lambda t: optax.apply_updates(t, t),
    "optax.incremental_update": lambda t: optax.incremental_update(t, t, 0.1),
    "optax.sgd": lambda t: optax.sgd(0.1).update(t, optax.sgd(0.1).init(t), t)[0],
    "labels": of_leaves(lambda _: "frozen"),
    "jax.device_get": jax.device_get,
    # What JAX hands on stays a reference.
    "jax.jit": lambda t: jax.jit(lambda t: t)(t),
    "flattened": lambda t: jax.tree.unflatten(jax.tree.structure(t), leaves(t)),
    "stop_gradient": jax.lax.stop_gradient,
    "jax.lax.cond": chosen_leaf,
    "jax.lax.scan": scanned,
    "jax.checkpoint": lambda t: jax.checkpoint(lambda t: t)(t),
    "custom_vjp": alike,
}
WITHOUT_DERIVATIVE = ("float", "labels", "len", "shape", "size", "jax.eval_shape")
HANDED_ON = [*IDIOMS][[*IDIOMS].index("jax.jit") :]


def total(tree):
    """Return a number that all numbers of a tree are in, those of references as well."""
    numbers = [one for one in leaves(jd.get(tree)) if not isinstance(one, str)]
    return sum(jnp.sum(jnp.asarray(one, jnp.float32) * (k + 1.3)) for k, one in enumerate(numbers)) + 0.7 * len(numbers)


def eager(idiom, tree):
    return idiom(tree)


def differentiated(idiom, tree):
    return jd.value_and_grad(lambda tree: total(idiom(tree)))(tree)


def unmapped(idiom, tree):
    return jax.vmap(lambda x, tree: x * total(idiom(tree)), in_axes=(0, None))(jnp.arange(3.0), tree)


def compiled(stage):
    return lambda idiom, tree: stage(lambda tree: total(idiom(tree)))(tree)


WAYS = {
    "eager": eager,
    "jd.value_and_grad": differentiated,
    "jd.jit": compiled(jd.jit),
    "jax.vmap": unmapped,
}


REFUSALS = (TypeError, ValueError, AttributeError, NotImplementedError, jd.DifferentiationError)


def outcome(run, idiom, tree):
    """Return what an idiom comes to, or None if it is refused."""
    try:
        return total(run(idiom, tree))
    except REFUSALS:
        return None


def loss(p):
    return jnp.sum(apply(p, X) ** 2)


@pytest.mark.parametrize("name", IDIOMS)
@on_worker0
def test_an_idiom_is_right_or_refused(big_world, name):
    value, idiom = parameters(3, 2), IDIOMS[name]
    reference = jd.remote(rank(1), parameters, args=(3, 2))
    module = jd.RemoteFunction(rank(2), parameters, apply, args=(3, 2))
    for way, run in WAYS.items():
        if way == "jd.value_and_grad" and name in WITHOUT_DERIVATIVE:
            continue
        with jd.context():
            for remote in (reference, module):
                found = outcome(run, idiom, remote)
                if found is None:
                    assert name not in HANDED_ON, (way, remote)
                else:
                    assert_close(found, total(run(idiom, value)), rtol=1e-5)


@pytest.mark.parametrize("name", IDIOMS)
@on_worker0
def test_an_idiom_over_a_gradient_is_right_or_refused(big_world, name):
    reference, idiom = jd.remote(rank(1), parameters, args=(3, 2)), IDIOMS[name]
    with jd.context():
        gradient = jd.grad(lambda p: jd.rpc_sync(rank(2), loss, args=(p,)))(reference)
        for run in (eager, compiled(jd.jit)):
            found = outcome(run, idiom, gradient)
            if found is not None:
                assert_close(found, total(run(idiom, jax.grad(loss)(parameters(3, 2)))), rtol=1e-5)
            else:
                assert name not in HANDED_ON or run is not eager
