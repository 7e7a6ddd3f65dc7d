"""Application of a module on the owner of its parameters: one compiled function for each module.

A module travels as a blueprint, from which another worker makes it again: a function or class both can import, and its
arguments. flax modules hold functions that cannot be pickled (``kernel_init``'s default, for example), so the arguments
of their class travel instead. Blueprints can be compared and hashed, so each worker builds the object of a blueprint
only once.
"""

import collections
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from jdistgrad.autograd.callee.functions import StateOfCall, changing_state, lost
from jdistgrad.autograd.callee.pullbacks import pays
from jdistgrad.autograd.values.holes import is_array
from jdistgrad.rpc.by_value import code_of, from_code
from jdistgrad.rpc.fingerprints import fingerprint
from jdistgrad.rpc.functions import Args, Kwargs, ServedFunction, describe, import_path, registered_name
from jdistgrad.rpc.rref import RRef

Made = tuple[Any, Any]  # parameters, and the module's other arrays, its state
Mode = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A call that makes an object. Arguments may be blueprints themselves.

    Equal arguments may make different objects: ``Power(2)`` returns integers, ``Power(2.0)`` floats, and a class may
    leave out of its comparisons what matters here.
    """

    make: Callable[..., Any]
    args: Args = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    typed: tuple[Any, ...] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        values = *self.args, *(value for _, value in self.kwargs)
        object.__setattr__(self, "typed", tuple(map(fingerprint, values)))

    def __reduce__(self) -> Any:
        return Blueprint, (self.make, self.args, self.kwargs)  # there, fingerprints are others

    @property
    def label(self) -> str:
        if self.make is from_code:
            return describe(built(self))
        made = self.args[0] if self.make is functools.partial else self.make
        return getattr(made, "__qualname__", None) or type(made).__name__


@dataclasses.dataclass(frozen=True)
class Again:
    """The same object as the one that the blueprint made after ``number`` others: a flax module may be used twice."""

    number: int


def blueprint(value: Any, take_apart: Callable[[Any], Blueprint | None]) -> Any:
    """Replace by blueprints all parts of a value that ``take_apart`` or this function knows how to make."""
    count = itertools.count()
    numbers: dict[int, int] = {}

    def inner(value: Any) -> Any:
        if id(value) in numbers:
            return Again(numbers[id(value)])
        known = take_apart(value)
        call = known or _call_for(value)
        if call is None:
            return value
        args = tuple(map(inner, call.args))  # before the others, as they are made
        made = Blueprint(call.make, args, tuple((name, inner(part)) for name, part in call.kwargs))
        number = next(count)
        if known is not None:
            numbers[id(value)] = number
        return made

    return inner(value)


def _call_for(value: Any) -> Blueprint | None:
    """Return the call that makes a value of Python's own types, whose parts may have blueprints. None for others."""
    if isinstance(value, types.FunctionType) and import_path(value) is None and registered_name(value) is None:
        code = code_of(value)  # made by another function, as nn.initializers.normal(0.02): no name finds it
        return None if code is None else Blueprint(from_code, (code,))
    if isinstance(value, functools.partial):
        return Blueprint(functools.partial, (value.func, *value.args), tuple(sorted(value.keywords.items())))
    if isinstance(value, list):
        return Blueprint(list, (tuple(value),))
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return Blueprint(tuple_of, value)
    if isinstance(value, set):
        return Blueprint(set, (frozenset(value),))
    if isinstance(value, Mapping):
        return Blueprint(dict, (tuple(value.items()),))
    return None


def tuple_of(*items: Any) -> tuple[Any, ...]:
    return items


def built(part: Any, made: list[Any] | None = None) -> Any:
    """Return an object, made or found again; add what was made to ``made``, in the order of ``Again.number``."""
    made = [] if made is None else made
    if isinstance(part, Again):
        return made[part.number]
    if not isinstance(part, Blueprint):
        return part
    args = [built(one, made) for one in part.args]
    made.append(part.make(*args, **{name: built(one, made) for name, one in part.kwargs}))
    return made[-1]


class Apply(ServedFunction):
    """A module's application, as a function of its parameters. It travels as the blueprint of the module.

    Attributes:
      stateful: whether the module has other arrays, its state. A reference to it follows the parameters.
      mode: the method by which flax sets a mode ("train" or "eval") and its arguments; empty for the mode that the
        module was made with.
    """

    pure = True
    has_modes = False

    def __init__(self, blueprint: Blueprint, *, stateful: bool, mode: Mode = ()):
        self.blueprint, self.stateful, self.mode = blueprint, stateful, mode
        self.state_argument = 1 if stateful else None
        self._compiled = functools.lru_cache(maxsize=64)(lambda *program: jax.jit(self._program(*program)))
        self._compiled_for: dict[Hashable, set[Hashable]] = collections.defaultdict(set)

    @property
    def label(self) -> str:
        return self.blueprint.label

    def init(self, rng: Any, args: Args) -> Made:
        """Return new parameters and the new state."""
        raise NotImplementedError

    def run(self, parameters: Any, state: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        """Return the module's result, and the state after the call: the same leaves where nothing has changed."""
        raise NotImplementedError

    def __call__(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the module. A call that gets a reference to the state changes the state there."""
        if not self.stateful:
            return self._applied(parameters, None, args, kwargs)
        with changing_state(self, (parameters, *args)) as ((_, state, *rest), _):
            return self._applied(parameters, state, tuple(rest), kwargs)

    def _applied(self, parameters: Any, state: Any, args: Args, kwargs: Kwargs) -> Any:
        """Apply the module, compiled for each value of arguments that are no arrays: ``train=True``, ``method=f``.

        Arguments that keep changing, as the number of a step, are not compiled for.
        """
        leaves, structure = jax.tree.flatten((args, kwargs))
        fixed = tuple(
            (fingerprint(leaf), leaf)
            if isinstance(leaf, Hashable) and not isinstance(leaf, float | complex) and not is_array(leaf)
            else None
            for leaf in leaves
        )
        arrays = [leaf for leaf, one in zip(leaves, fixed, strict=True) if one is None]
        value = state.value if isinstance(state, StateOfCall) else state
        seen = self._compiled_for[structure, tuple(one is None for one in fixed)]
        program = self._compiled if pays(seen, fixed) else self._program
        result, changed = program(structure, fixed)(parameters, {} if value is None else value, arrays)
        if changed:
            if not isinstance(state, StateOfCall):
                raise lost(self)
            before, tree = jax.tree.flatten(value)
            state.left = jax.tree.unflatten(tree, [changed.get(k, leaf) for k, leaf in enumerate(before)])
        return result

    def _program(self, structure: Any, fixed: Sequence[Any]) -> Callable[..., Any]:
        def run(parameters: Any, state: Any, arrays: list[Any]) -> tuple[Any, dict[int, Any]]:
            rest = iter(arrays)
            args, kwargs = jax.tree.unflatten(structure, [next(rest) if one is None else one[1] for one in fixed])
            result, after = self.run(parameters, state, args, kwargs)
            known: Any
            found: Any
            (before, known), (now, found) = jax.tree.flatten(state), jax.tree.flatten(after)
            if known != found:
                raise ValueError(
                    f"{self.label} made other variables in this call than when it was initialized: {found}, expected "
                    f"{known}. Make all of them at first, or return what a call makes anew (sow)."
                )
            each = enumerate(zip(before, now, strict=True))
            return result, {k: jax.lax.stop_gradient(new) for k, (old, new) in each if new is not old}

        return run

    def __reduce__(self) -> Any:
        return apply_of, (type(self), self.blueprint, self.stateful, self.mode)


@functools.cache
def apply_of(kind: Any, blueprint: Any, stateful: bool, mode: Mode) -> Apply:  # noqa: FBT001 pickle passes it by position
    """Return the one application of a module in this process."""
    return kind(blueprint, stateful=stateful, mode=mode)


def make(apply: Apply, rng: Any, args: Args) -> tuple[RRef[Any], RRef[Any] | None]:
    """Make a module on its owner; return references to its parameters and, if there is any, to its state."""
    parameters, state = apply.init(rng, args)
    return RRef(parameters), RRef(state) if jax.tree.leaves(state) else None
