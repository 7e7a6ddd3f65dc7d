"""Application of flax.linen modules on another worker."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
from flax import linen

from jdistgrad.autograd.values.holes import is_array
from jdistgrad.modules.applying import Apply, Made
from jdistgrad.modules.blueprint import Blueprint, blueprint
from jdistgrad.rpc.functions import Args, Kwargs


class LinenApply(Apply):
    """``module.apply``: the parameters are the collection "params", the state is all other collections.

    Like ``module.apply``, a call changes the collections that its argument ``mutable`` names.
    """

    @functools.cached_property
    def module(self) -> linen.Module:
        return self.blueprint.build()

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
                f"mutable={mutable!r}: {self.label} has no collection {unknown[0]!r} on its owner, only "
                f"{sorted(state) or 'its parameters'}. Return from the module what it makes anew in each call (sow)."
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


def require_arguments(module: linen.Module, args: Args) -> None:
    """Raise TypeError if a module cannot be called with its example arguments."""
    try:
        inspect.signature(type(module).__call__).bind(module, *args)
    except TypeError as error:
        raise TypeError(
            f"RemoteModule: a linen module is initialized by a call, and {type(module).__name__} cannot be called with "
            f"these {len(args)} example arguments: {error}. Pass them as in RemoteModule(to, module, (x,))"
        ) from error


def blueprint_of(module: linen.Module) -> Blueprint:
    return blueprint(module, take_apart)
