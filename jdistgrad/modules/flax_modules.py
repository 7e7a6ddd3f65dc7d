"""Application of flax.linen and flax.nnx modules on another worker. Importing flax is slow."""

import dataclasses
import functools
import io
import operator
import pickle
import types
from typing import Any

import jax
from flax import linen, nnx

from jdistgrad import jaxprs
from jdistgrad.autograd.values.holes import is_array
from jdistgrad.modules.applying import Apply, Blueprint, Made
from jdistgrad.rpc.by_value import CODE, code_of
from jdistgrad.rpc.functions import Args, Kwargs, import_path, registered_name


class LinenApply(Apply):
    """``module.apply``: the parameters are the collection "params", the state is all other collections.

    Like ``module.apply``, a call changes the collections that its argument ``mutable`` names.
    """

    def init(self, rng: Any, args: Args) -> Made:
        """Initialize the module, compiled as a whole if all arguments are arrays: op by op takes twice as long."""
        key = jax.random.key(rng) if isinstance(rng, int) else rng
        init = jax.jit(self.made.init) if all(map(is_array, jax.tree.leaves(args))) else self.made.init
        variables = dict(init(key, *args))
        return variables.pop("params", {}), variables

    def run(self, parameters: Any, state: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        mutable = kwargs.pop("mutable", False)
        found = self.made.apply({"params": parameters, **state}, *args, mutable=mutable, **kwargs)
        if mutable is False:
            return found, state
        result, changed = found
        unknown = sorted(set(changed) - {"params", *state})
        if unknown:
            raise ValueError(
                f"mutable={mutable!r}: {self.label} has only {sorted(state) or 'parameters'} on its owner, not "
                f"{unknown[0]!r}. Return from the module the variables that each call makes (sow)."
            )
        return result, {name: changed.get(name, part) for name, part in state.items()}


class ModulePickler(pickle.Pickler):
    """Pickles a linen module as its class and the fields that are not defaults; functions and classes as numbers.

    Attributes:
      functions: the functions and classes, by ``id``; those that no name leads to, ``initializers.normal(0.1)``, by
        value.
    """

    def __init__(self, stream: Any):
        super().__init__(stream)
        self.functions = dict[int, Any]()

    def persistent_id(self, obj: Any) -> int | None:
        has_name = import_path(obj) is not None or registered_name(obj) is not None
        if not has_name and not isinstance(obj, CODE):
            return None
        if id(obj) not in self.functions:
            code = code_of(obj) if isinstance(obj, types.FunctionType) and not has_name else None
            self.functions[id(obj)] = obj if code is None else code
        return [*self.functions].index(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, linen.Module):
            return NotImplemented
        fields = [field for field in dataclasses.fields(obj) if field.init and field.name != "parent"]
        given = {field.name: getattr(obj, field.name) for field in fields}
        changed = {field.name: given[field.name] for field in fields if given[field.name] is not field.default}
        kind: Any = type(obj)
        return functools.partial(kind, **changed), ()


def blueprint(module: Any) -> Blueprint:
    stream = io.BytesIO()
    pickler = ModulePickler(stream)
    pickler.dump(module)
    named = module.func if isinstance(module, functools.partial) else module
    label = getattr(named, "__qualname__", None) or type(named).__name__
    return Blueprint(label, stream.getvalue(), tuple(pickler.functions.values()))


class NnxApply(Apply):
    """A call of the module: the parameters are its ``nnx.Param``, the state is its other variables, as plain dicts."""

    has_modes = True

    def init(self, rng: Any, args: Args) -> Made:
        """Make the module and return its variables. The arguments are not needed."""
        _, parameters, state = nnx.split(self.made(rngs=nnx.Rngs(rng)), nnx.Param, ...)
        return nnx.to_pure_dict(parameters), nnx.to_pure_dict(state)

    def run(self, parameters: Any, state: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        call, before = functools.partial(self._called, args=args, kwargs=kwargs), (parameters, state)
        result, after = call(before)
        known, (found, tree) = jax.tree.leaves(before), jax.tree.flatten(after)
        if not all(map(operator.is_, known, found)):
            # nnx.remat and nnx.jit return new objects for what they pass on: only a trace shows that these are the same
            numbers = jaxprs.passed_on(jax.make_jaxpr(lambda before: call(before)[1])(before).jaxpr)
            found = [one if k is None else known[k] for k, one in zip(numbers, found, strict=True)]
        kept, left = jax.tree.unflatten(tree, found)
        for (path, one), mine in zip(jax.tree_util.tree_leaves_with_path(kept), known, strict=False):
            if one is not mine:
                raise ValueError(
                    f"{self.label} changes its parameter {jax.tree_util.keystr(path)} in a call, as nnx.SpectralNorm("
                    "update_stats=True) does. Only optimizers change the parameters of a RemoteModule: use another "
                    "type than nnx.Param for variables that calls change."
                )
        return result, left

    def _called(self, before: tuple[Any, Any], args: Args, kwargs: Kwargs) -> tuple[Any, tuple[Any, ...]]:
        """Return the result, and the parameters and the state after the call, without variables that it made (sow)."""
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
        return nnx.split(nnx.eval_shape(lambda: self.made(rngs=nnx.Rngs(0))), nnx.Param, ...)
