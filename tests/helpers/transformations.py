"""Every transformation that optax exports and that can be made with few arguments, and usual chains."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from jax.tree_util import DictKey, tree_map_with_path

W = DictKey("w")
ARGUMENTS = ((), (0.1,), (1.0,), (2,), (optax.sgd(0.1), 3), (optax.sgd(0.1),))


def made(function):
    """Return a transformation that one of optax's functions makes with default arguments, or None."""
    for args in ARGUMENTS:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = function(*args)
            if isinstance(found, optax.GradientTransformation | optax.MultiSteps):
                return found
    return None


def every_transformation():
    """Yield the names and transformations of all functions of optax that make one, and of usual chains."""
    for module in (optax, optax.contrib):
        for name, function in sorted(vars(module).items()):
            if name[0] != "_" and name.islower() and callable(function) and (found := made(function)) is not None:
                yield f"{module.__name__}.{name}", found
    adam = optax.adam(0.1)
    yield "chain(clip, adam)", optax.chain(optax.clip(0.1), adam)
    yield "chain(clip_by_global_norm, adam)", optax.chain(optax.clip_by_global_norm(1.0), adam)
    yield (
        "chain(clip_by_global_norm, adam) every 3",
        optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), adam), 3),
    )
    yield "sgd every 3", optax.MultiSteps(optax.sgd(0.1), 3)
    yield "warmup", optax.adamw(optax.schedules.warmup_constant_schedule(0.0, 0.1, 10))
    yield "decay of matrices", optax.adamw(0.1, mask=lambda params: jax.tree.map(lambda p: jnp.ndim(p) > 1, params))
    yield "decay of w", optax.adamw(0.1, mask=lambda params: tree_map_with_path(lambda path, _: path[-1] == W, params))


TRANSFORMATIONS = dict(every_transformation())

PARAMS = {
    "a": {"w": jnp.linspace(-1, 1, 35).reshape(7, 5), "b": jnp.zeros(3)},
    "c": {"w": jnp.linspace(0, 2, 12).reshape(3, 4)},
    "s": jnp.float32(2),
    "here": jnp.arange(3.0),
}
REFUSED = {"optax.flatten", "optax.scale_by_lbfgs"}  # arrays of several owners in one, or in one loop
# What the serial program cannot do with these arguments either: functions to call, or parameters without dimensions.
NOT_HERE = """
add_noise conditionally_mask conditionally_transform lbfgs measure_with_ema scale_by_backtracking_linesearch
scale_by_schedule scale_by_sm3 scale_by_zoom_linesearch sm3 snapshot stateless stateless_with_tree_map
contrib.differentially_private_aggregate contrib.hutchinson_estimator_diag_hessian contrib.sam contrib.scale_by_muon
contrib.sophia contrib.split_real_and_imaginary
"""
NOT_HERE = {f"optax.{name}" for name in NOT_HERE.split()}
OFTEN = {
    *REFUSED, "optax.adam", "optax.lamb", "optax.noisy_sgd", "optax.apply_if_finite", "optax.zero_nans",
    "optax.contrib.prodigy", "chain(clip_by_global_norm, adam) every 3", "decay of w", "warmup",
}  # fmt: skip


def marks_of(name):
    return [] if name in OFTEN else pytest.mark.long


def with_extra(name):
    """Return a transformation, and extra arguments for its ``update``."""
    tx = TRANSFORMATIONS[name]
    return (
        (tx, {}) if isinstance(tx, optax.MultiSteps) else (optax.with_extra_args_support(tx), {"value": jnp.ones(())})
    )


def gradients(params, step):
    return jax.tree.map(lambda p: 3 * jnp.sin(p + step), params)


def potential(params, step):
    """Return a function's value whose gradient is ``gradients(params, step)``."""
    return sum(jnp.sum(-3 * jnp.cos(p + step)) for p in jax.tree.leaves(params))
