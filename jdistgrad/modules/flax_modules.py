"""Application of flax.linen and flax.nnx modules on another worker. Importing flax is slow."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
from flax import linen, nnx

from jdistgrad import jaxprs
from jdistgrad.autograd.values.holes import is_array
from jdistgrad.modules.applying import Apply, Blueprint, Made, built
from jdistgrad.rpc.functions import Args, Kwargs


class LinenApply(Apply):
    """``module.apply``: the parameters are the collection "params", the state is all other collections.

    Like ``module.apply``, a call changes the collections that its argument ``mutable`` names.
    """

    @functools.cached_property
    def module(self) -> linen.Module:
        return built(self.blueprint)

    def init(self, rng: Any, args: Args) -> Made:
        """Initialize the module, compiled as a whole if all arguments are arrays: op by op takes twice as long."""
        key = jax.random.key(rng) if isinstance(rng, int) else rng
        init = jax.jit(self.module.init) if all(map(is_array, jax.tree.leaves(args))) else self.module.init
        variables = dict(init(key, *args))
        return variables.pop("params", {}), variables

    def run(self, parameters: Any, state: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        mutable = kwargs.pop("mutable", False)
        found = self.module.apply({"params": parameters, **state}, *args, mutable=mutable, **kwargs)
        if mutable is False:
            return found, state
        result, changed = found
        unknown = sorted(set(changed) - {"params", *state})
        if unknown:
            raise ValueError(
                f"mutable={mutable!r}: {self.label} has only {sorted(state) or 'parameters'} on its owner, not "
                f"{unknown[0]!r}. Return from the module what it makes anew in each call (sow)."
            )
        return result, {name: changed.get(name, part) for name, part in state.items()}


def take_apart(value: Any) -> Blueprint | None:
    """Return the blueprint of a module: its class and the fields that are not defaults. None for other values."""
    if not isinstance(value, linen.Module):
        return None
    fields = [field for field in dataclasses.fields(value) if field.init and field.name != "parent"]
    given = [(field.name, getattr(value, field.name)) for field in fields]
    defaults = {field.name: field.default for field in fields}
    return Blueprint(type(value), (), tuple((name, one) for name, one in given if one is not defaults[name]))


class NnxApply(Apply):
    """A call of the module: the parameters are its ``nnx.Param``, the state is its other variables, as plain dicts."""

    has_modes = True

    def init(self, rng: Any, args: Args) -> Made:
        """Make the module and return its variables. The arguments are not needed."""
        _, parameters, state = nnx.split(self._make(rng), nnx.Param, ...)
        return nnx.to_pure_dict(parameters), nnx.to_pure_dict(state)

    def run(self, parameters: Any, state: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        call, before = functools.partial(self._called, args=args, kwargs=kwargs), (parameters, state)
        result, after = call(before)
        kept, left = _with_the_same_leaves(before, after, lambda before: call(before)[1])
        known, found = map(jax.tree_util.tree_leaves_with_path, (parameters, kept))
        for (path, one), (_, other) in zip(known, found, strict=True):
            if one is not other:  # parameters are the optimizer's business
                raise ValueError(
                    f"{self.label} changes its parameter {jax.tree_util.keystr(path)} in a call, as nnx.SpectralNorm("
                    "update_stats=True) does. Only an optimizer changes the parameters of a RemoteModule: make what "
                    "calls change a variable of another type than nnx.Param."
                )
        return result, left

    def _called(self, before: tuple[Any, Any], args: Args, kwargs: Kwargs) -> tuple[Any, tuple[Any, ...]]:
        """Return the module's result, and its parameters and its state after the call: those it was made with.

        A call may have made other variables (sow).
        """
        graph, *templates = self._parts
        filled = [jax.tree.map(lambda leaf: leaf, one) for one in templates]
        for one, values in zip(filled, before, strict=True):
            nnx.replace_by_pure_dict(one, values)
        module = nnx.merge(graph, *filled)
        if self.mode:
            method, attributes = self.mode
            getattr(module, method)(**dict(attributes))
        result, after = module(*args, **kwargs), []
        for template, kind in zip(templates, (nnx.Param, nnx.Not(nnx.Param)), strict=True):
            known = {path for path, _ in nnx.to_flat_state(template)}
            found = [(path, one) for path, one in nnx.to_flat_state(nnx.state(module, kind)) if path in known]
            after.append(nnx.to_pure_dict(nnx.from_flat_state(found)))
        return result, tuple(after)

    @functools.cached_property
    def _parts(self) -> Any:
        """The module's structure, with shapes instead of arrays."""
        return nnx.split(nnx.eval_shape(lambda: self._make(0)), nnx.Param, ...)

    def _make(self, rng: Any) -> Any:
        return built(self.blueprint)(rngs=nnx.Rngs(rng))


def _with_the_same_leaves(before: Any, after: Any, call: Callable[[Any], Any]) -> Any:
    """Return what a call leaves, with the leaves from before where it passes them on, as ``nnx.remat`` and ``jit`` do.

    These return other objects, of which only a trace tells that they are the same.
    """
    known, (found, tree) = jax.tree.leaves(before), jax.tree.flatten(after)
    if len(known) == len(found) and all(map(operator.is_, known, found)):
        return after
    numbers = jaxprs.passed_on(jax.make_jaxpr(call)(before).jaxpr)
    return jax.tree.unflatten(tree, [one if k is None else known[k] for k, one in zip(numbers, found, strict=True)])
