"""Hook for calls on traced values; autograd installs its handler here."""

import dataclasses
import functools
import types
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad._compat import trace_state_clean
from jdistgrad.errors import EncodingError
from jdistgrad.rpc import trees

_handler: Any = None  # ``autograd.traced_calls.TracedCalls``, of a layer above


def install(handler: Any) -> None:
    global _handler
    _handler = handler


def handler_for(*values: Any) -> Any:
    """Return the handler of a call with these arguments, or (the common case, quickly) None if JAX traces nothing."""
    if trace_state_clean() or not (any(is_traced(leaf) for leaf in trees.leaves(values)) or staging()):
        return None
    return _handler


def is_traced(leaf: Any) -> bool:
    """Return whether a leaf (a reference counts as one) is traced."""
    return isinstance(getattr(leaf, "traced_part", leaf), jax.core.Tracer)


def staging() -> bool:
    """Return whether even operations on constants are staged out: inside jit, scan and the like."""
    return isinstance(jnp.zeros((), np.int32), jax.core.Tracer)


def holds_traced(functions: Iterable[Any]) -> bool:
    """Return whether functions hold a traced value: in closures, defaults, partials, or bound to methods.

    Objects of dataclasses that JAX does not know hold what is in their fields.
    """
    pending, seen = list(functions), dict[int, Any]()
    while pending:
        held = pending.pop()
        if id(held) in seen:
            continue
        seen[id(held)] = held
        for leaf in trees.leaves(held):
            if is_traced(leaf):
                return True
            if may_hold_arrays(leaf):
                pending += _held_by(leaf)
    return False


def may_hold_arrays(leaf: Any) -> bool:
    """Return whether a leaf may hold arrays that JAX does not see: a function, or an object of a dataclass."""
    return callable(leaf) or dataclasses.is_dataclass(leaf)


EMPTY = types.CellType()  # the cell of a variable that is set later


def _held_by(function: Any) -> list[Any]:
    if dataclasses.is_dataclass(function) and not isinstance(function, type):
        return [getattr(function, field.name, None) for field in dataclasses.fields(function)]
    if isinstance(function, functools.partial):
        return [function.func, list(function.args), function.keywords]
    if isinstance(function, types.MethodType):
        return [function.__func__, function.__self__]
    if hasattr(function, "__wrapped__"):  # jitted, or decorated
        return [function.__wrapped__]
    if not isinstance(function, types.FunctionType):
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != EMPTY]
    return [*cells, function.__defaults__, function.__kwdefaults__]


def refuse_traced(what: str) -> EncodingError:
    return EncodingError(
        f"{what}: a traced value has no data yet and cannot be sent to another worker like this. Inside jax.grad and "
        "jax.jit, pass it as an argument of rpc_sync, rpc_async or remote, in containers JAX knows: "
        "jax.tree_util.register_dataclass makes one of your class, and jax.tree_util.Partial of a partial function."
    )
