"""Application of flax.nnx modules on another worker."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

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
        graph, *templates = self._parts
        filled = [_filled(one, values) for one, values in zip(templates, (parameters, state), strict=True)]
        before, module = _arrays(filled[0]), nnx.merge(graph, *filled)
        if self.mode:
            method, attributes = self.mode
            getattr(module, method)(**dict(attributes))
        result = module(*args, **kwargs)
        self._require_same(before, nnx.state(module, nnx.Param))
        return result, _taken(templates[1], nnx.state(module, nnx.Not(nnx.Param)))

    def _require_same(self, before: Any, after: Any) -> None:
        """Raise if a call has replaced a parameter: that is the optimizer's business."""
        for (path, known), found in zip(before, _arrays(after), strict=True):
            if known is not found[1]:
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


def _arrays(state: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))


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
