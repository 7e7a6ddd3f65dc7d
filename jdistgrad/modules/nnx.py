"""Application of flax.nnx modules on another worker."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jdistgrad import jaxprs
from jdistgrad.modules.applying import Apply, Made
from jdistgrad.modules.blueprint import Blueprint, blueprint
from jdistgrad.rpc.functions import Args, Kwargs


class NnxApply(Apply):
    """A call of the module: the parameters are its ``nnx.Param``, the state is its other variables, as plain dicts."""

    has_modes = True

    def init(self, rng: Any, args: Args) -> Made:
        """Make the module and return its variables. The arguments are not needed."""
        _, parameters, state = nnx.split(self._make(rng), nnx.Param, ...)
        return nnx.to_pure_dict(parameters), nnx.to_pure_dict(state)

    def run(self, parameters: Any, state: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        def call(before: Any) -> tuple[Any, Any]:
            parameters, state = before
            return self._called(parameters, state, args, kwargs)

        before = parameters, state
        result, after = call(before)
        kept, left = _with_the_same_leaves(before, after, lambda before: call(before)[1])
        self._require_same(_arrays(parameters), _arrays(kept))
        return result, left

    def _called(self, parameters: Any, state: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        """Return the module's result, and its parameters and its state after the call."""
        graph, *templates = self._parts
        filled = [_filled(one, values) for one, values in zip(templates, (parameters, state), strict=True)]
        module = nnx.merge(graph, *filled)
        if self.mode:
            method, attributes = self.mode
            getattr(module, method)(**dict(attributes))
        result = module(*args, **kwargs)
        kinds = nnx.Param, nnx.Not(nnx.Param)
        return result, tuple(_taken(one, nnx.state(module, kind)) for one, kind in zip(templates, kinds, strict=True))

    def _require_same(self, before: Any, after: Any) -> None:
        """Raise if a call has replaced a parameter: that is the optimizer's business."""
        for (path, known), (_, found) in zip(before, after, strict=True):
            if known is not found:
                raise ValueError(
                    f"{self.label} changes its parameter {jax.tree_util.keystr(path)} in a call, as nnx.SpectralNorm("
                    "update_stats=True) does. Only an optimizer changes the parameters of a RemoteModule: make what "
                    "calls change a variable of another type than nnx.Param."
                )

    @functools.cached_property
    def _parts(self) -> Any:
        """The module's structure, with shapes instead of arrays."""
        return nnx.split(nnx.eval_shape(lambda: self._make(0)), nnx.Param, ...)

    def _make(self, rng: Any) -> Any:
        return self.blueprint.build()(rngs=nnx.Rngs(rng))


def _arrays(values: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(values)


def _with_the_same_leaves(before: Any, after: Any, call: Callable[[Any], Any]) -> Any:
    """Return what a call leaves, with the leaves from before where it passes them on, as ``nnx.remat`` and ``jit`` do.

    These return other objects, of which only a trace tells that they are the same.
    """
    known, (found, tree) = jax.tree.leaves(before), jax.tree.flatten(after)
    if len(known) == len(found) and all(map(operator.is_, known, found)):
        return after
    numbers = jaxprs.passed_on(jax.make_jaxpr(call)(before).jaxpr)
    return jax.tree.unflatten(tree, [one if k is None else known[k] for k, one in zip(numbers, found, strict=True)])


def _filled(template: Any, values: Any) -> Any:
    filled = jax.tree.map(lambda leaf: leaf, template)
    nnx.replace_by_pure_dict(filled, values)
    return filled


def _taken(template: Any, state: Any) -> Any:
    """Return the variables that the module was made with. A call may have made others (sow)."""
    found = nnx.to_flat_state(state)
    known = {path for path, _ in nnx.to_flat_state(template)}
    return nnx.to_pure_dict(nnx.from_flat_state([(path, one) for path, one in found if path in known]))


def blueprint_of(factory: Callable[..., Any]) -> Blueprint:
    described = blueprint(factory, lambda value: None)
    return described if isinstance(described, Blueprint) else Blueprint(functools.partial, (described,))
