"""State that a function changes where it runs: batch statistics, counters of random generators.

State is a value that its owner keeps under a reference, which is an argument of the function. JAX may trace the
function, more than once even. So a traced run gets the state in a ``StateOfCall`` and leaves the new state there. The
new state is stored when the call has run.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jdistgrad.autograd.tape.tape import current_tape
from jdistgrad.rpc import trees
from jdistgrad.rpc.functions import Args, ServedFunction, describe
from jdistgrad.rpc.rref import ByReference, RRef
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.message import from_token


@dataclasses.dataclass(slots=True, eq=False)
class StateOfCall:
    """The state that a call starts from, and the state that the call leaves (None: the same)."""

    value: Any
    left: Any = None


jax.tree_util.register_pytree_node(StateOfCall, lambda one: ((one.value,), None), lambda _, of: StateOfCall(*of))
trees.OPAQUE.add(StateOfCall)  # the object that the function gets is the one that is read afterwards


def state_argument(function: Any) -> int | None:
    """Return the number of the argument that refers to state which a function changes, or None."""
    while isinstance(function, ServedFunction) and function.same_arguments_as is not None:
        function = function.same_arguments_as
    return function.state_argument if isinstance(function, ServedFunction) else None


def state_among(function: Any, args: Args) -> StateOfCall | None:
    """Return the state that a function which runs in a trace has been given."""
    number = state_argument(function)
    return args[number] if number is not None and isinstance(args[number], StateOfCall) else None


def with_state(function: Any, args: Args) -> Args:
    """Return the arguments with the present state, for a run that stores nothing."""
    reference = _reference(function, args)
    return args if reference is None else _replaced(function, args, StateOfCall(reference.to_here()))


def with_state_of(tag: Any, function: Any, args: Args) -> Args:
    """Return the arguments with the state that a recorded call started from, to run the call again."""
    if _reference(function, args) is None or isinstance(tag, jax.core.Tracer):
        return with_state(function, args)
    recording = current_tape(lambda: describe(function)).find(from_token(tag)[1], last=False).derived
    return _replaced(function, args, StateOfCall(recording.state))


@contextlib.contextmanager
def changing_state(function: Any, args: Args) -> Iterator[tuple[Args, StateOfCall | None]]:
    """Give a block the arguments with the present state, and store the state that the block leaves there.

    Calls that change one state take turns. If the block raises an exception, nothing is stored.
    """
    reference = _reference(function, args)
    if reference is None:
        yield args, None
        return
    owned = current_worker().references.owned
    with owned.lock(reference.id):
        state = StateOfCall(reference.to_here())
        yield _replaced(function, args, state), state
        if state.left is not None:
            if not reference.is_owner():
                raise lost(function)
            owned.replace(reference.id, state.left)


def lost(function: Any) -> TypeError:
    """Return the error for a call that changes state which is not on the worker that it runs on."""
    return TypeError(
        f"{describe(function)} changes state (batch statistics, random generators) which lives on another worker, so "
        "the change would be lost. Call the module itself, which runs where its state is, or call it in eval mode."
    )


def _reference(function: Any, args: Args) -> RRef[Any] | None:
    number = state_argument(function)
    argument = None if number is None else args[number]
    while isinstance(argument, ByReference):
        argument = argument.rref
    return argument if isinstance(argument, RRef) else None


def _replaced(function: Any, args: Args, state: StateOfCall) -> Args:
    number = state_argument(function)
    assert number is not None
    return *args[:number], state, *args[number + 1 :]
