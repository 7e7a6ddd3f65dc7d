"""Every transformation that optax exports and that can be made with few arguments, and usual chains."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax.traverse_util import path_aware_map

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
    yield "decay of w", optax.adamw(0.1, mask=lambda params: path_aware_map(lambda path, _: path[-1] == "w", params))


TRANSFORMATIONS = dict(every_transformation())
