"""Application of a module on the owner of its parameters: one compiled function for each module."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdistgrad.modules.blueprint import Blueprint
from jdistgrad.rpc.functions import Args, Kwargs, ServedFunction
from jdistgrad.rpc.references.rref import RRef

Made = tuple[Any, Any]  # parameters, and the module's other arrays


class Apply(ServedFunction):
    """A module's application, as a function of its parameters. It travels as the blueprint of the module.

    ``stateful``: the argument after the parameters is the module's other arrays, which are read, never changed.
    """

    pure = True

    def __init__(self, blueprint: Blueprint, *, stateful: bool):
        self.blueprint, self.stateful = blueprint, stateful
        self._compiled = functools.lru_cache(maxsize=64)(self._compile)

    def init(self, rng: Any, args: Args) -> Made:
        """Return new parameters and other arrays."""
        raise NotImplementedError

    def run(self, parameters: Any, state: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the module's result."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        return self.blueprint.label

    def with_state(self, *, stateful: bool) -> "Apply":
        kind: Any = type(self)
        return apply_of(kind, self.blueprint, stateful)

    def __call__(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the module, compiled for each value of arguments that are bools, ints or strings (``train=True``)."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        fixed = tuple((type(leaf), leaf) if isinstance(leaf, bool | int | str) else None for leaf in leaves)
        arrays = [leaf for leaf, one in zip(leaves, fixed, strict=True) if one is None]
        return self._compiled(structure, fixed)(parameters, arrays)

    def _compile(self, structure: Any, fixed: Sequence[Any]) -> Callable[..., Any]:
        def run(parameters: Any, arrays: list[Any]) -> Any:
            rest = iter(arrays)
            args, kwargs = jax.tree.unflatten(structure, [next(rest) if one is None else one[1] for one in fixed])
            state, args = (args[0], args[1:]) if self.stateful else ({}, args)
            return self.run(parameters, state, args, kwargs)

        return jax.jit(run)

    def __reduce__(self) -> Any:
        return apply_of, (type(self), self.blueprint, self.stateful)


@functools.cache
def apply_of(kind: Any, blueprint: Any, stateful: bool) -> Apply:  # noqa: FBT001 pickle passes it by position
    """Return the one application of a module in this process."""
    return kind(blueprint, stateful=stateful)


def make(apply: Apply, rng: Any, args: Args) -> tuple[RRef[Any], RRef[Any] | None]:
    """Make a module on its owner; return references to its parameters and, if there are any, to its other arrays."""
    parameters, state = apply.init(rng, args)
    return RRef(parameters), RRef(state) if jax.tree.leaves(state) else None
