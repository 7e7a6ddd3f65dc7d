"""Exceptions that cross workers: their own type, the remote traceback, and the chain of workers as notes.

Users' exception classes may raise anything when an exception is turned into text, copied, pickled or given a note.
This module lets none of that through, because the caller must get an answer.
"""

import contextlib
import copy
import dataclasses
import os
import pathlib
import pickle
import traceback
import types
from typing import Any

from jdistgrad.errors import RemoteError
from jdistgrad.rpc import unpickling
from jdistgrad.rpc.references.in_messages import encoding

PACKAGE = str(pathlib.Path(__file__).parents[2]) + os.sep
SHORT = 160  # characters
SHOWN = 20  # frames at each end of a traceback: an endless recursion has a thousand between them


@dataclasses.dataclass(slots=True)
class Failure:
    """An exception on its way to the caller, with texts to use instead if it cannot be rebuilt."""

    error: BaseException | None
    spelled: str
    note: str

    def __reduce__(self) -> Any:
        return _rebuild, (_pickled(self.error), self.spelled, self.note, _notes(self.error))

    def to_raise(self) -> BaseException:
        """Return the exception for the caller to raise; called once for each caller."""
        twin = _copied(self.error) if isinstance(self.error, Exception) else None
        error = _in_words(self.spelled) if twin is None else twin
        _set_notes(error, [*_notes(self.error), self.note])
        return error


def pack(error: BaseException, where: str) -> Failure:
    """Make an exception ready to travel; ``where`` says what was running, on which worker, called by whom."""
    frames = traceback.StackSummary.from_list(_from_users_code(error)).format()
    if len(frames) > 2 * SHOWN:
        frames[SHOWN:-SHOWN] = [f"  ... {len(frames) - 2 * SHOWN} more ...\n"]
    text = "".join(frames).rstrip()
    failure = Failure(error, spelled(error), f"{where}\n{text}" if text else where)
    _let_go_of_frames(error)
    return failure


def _from_users_code(error: BaseException) -> list[traceback.FrameSummary]:
    """Return an exception's frames, without those of this package that only lead to code of others."""
    frames = list(traceback.extract_tb(error.__traceback__))
    ours = [frame.filename.startswith(PACKAGE) for frame in frames]
    return frames[ours.index(False) :] if False in ours else frames


def spelled(error: BaseException) -> str:
    """Return an exception's type and text, without its notes."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        text = str(error)
    except BaseException as raised:
        text = f"(asking for its text raised {type(raised).__name__})"
    return f"{name}: {text}" if text else name


def in_short(error: BaseException) -> str:
    """Return the beginning of an exception's type and text, for a message beside one that shows all of it."""
    text = spelled(error)
    line = text.split("\n", 1)[0][:SHORT]
    return line if line == text else f"{line} ..."


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception of any class, if the class lets one."""
    _set_notes(error, [*_notes(error), note])


def _notes(error: BaseException | None) -> list[str]:
    try:
        return [str(note) for note in getattr(error, "__notes__", [])]
    except BaseException:
        return []


def _set_notes(error: BaseException, notes: list[str]) -> None:
    with contextlib.suppress(BaseException):
        error.__notes__ = notes


def _let_go_of_frames(error: BaseException | None) -> None:
    """Remove tracebacks, which keep every local variable of the failed call alive, including references."""
    found, seen = [error], set[int]()
    while found:
        one = found.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            with contextlib.suppress(BaseException):
                one.__traceback__ = None
                found += [one.__cause__, one.__context__, *_members(one)]


def _members(error: BaseException) -> tuple[BaseException, ...]:
    return error.exceptions if isinstance(error, BaseExceptionGroup) else ()


def _copied(error: Exception) -> Exception | None:
    """Return a copy to raise: one exception may be raised for several callers, each adding its own traceback and notes.

    Never return the object itself: its new traceback would keep the caller's values alive as long as the owner keeps
    the exception. If ``__init__`` needs other arguments than ``args``, the copy is made without it. Return None if that
    fails too.
    """
    for made in (_copy, _made_anew):
        with contextlib.suppress(BaseException):
            twin = made(error)
            if twin is not error and isinstance(twin, Exception):
                return twin
    return None


def _copy(error: Exception) -> Exception:
    twin = copy.copy(error)
    return _with_args(twin, error.args) if _is_made_of_args(error) else twin


def _is_made_of_args(error: BaseException) -> bool:
    """Return whether Python copies and pickles an exception as its class, to be called with ``args``, and attributes.

    An ``__init__`` that makes a text of its argument would make another one of that text.
    """
    kind: Any = type(error)
    return isinstance(kind.__reduce__, types.MethodDescriptorType) and kind.__reduce_ex__ is object.__reduce_ex__


def _with_args(error: Any, args: tuple[Any, ...]) -> Any:
    if isinstance(error, BaseException):
        error.args = args
    return error


class _WithArgs:
    """An exception that is pickled as Python would, and has its ``args`` again."""

    def __init__(self, error: Exception):
        self._parts = error, error.args

    def __reduce__(self) -> Any:
        return _with_args, self._parts


def _made_anew(error: Exception) -> Exception:
    return _put_together(type(error), error.args, error.__dict__)


def _in_words(text: str) -> RemoteError:
    return RemoteError(f"the remote function raised {text}", remote_type=text)


class _InParts:
    """An exception that is pickled as its class, ``args`` and attributes: its ``__init__`` may need other arguments."""

    def __init__(self, error: Exception):
        self._parts = type(error), error.args, error.__dict__

    def __reduce__(self) -> Any:
        return _put_together, self._parts


def _put_together(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    twin = kind.__new__(kind, *args)
    twin.args = args
    twin.__dict__.update(attributes)
    return twin


class _GroupInParts:
    """A group of exceptions that is pickled as its class and its exceptions, each in its own form, or else in words."""

    def __init__(self, group: ExceptionGroup[Any]):
        members = [Failure(one, spelled(one), "") for one in group.exceptions]
        self._parts = type(group), group.message, members, group.__dict__

    def __reduce__(self) -> Any:
        return _group_together, self._parts


def _group_together(kind: type[Exception], message: str, members: list[Failure], attributes: Any) -> Exception:
    return _put_together(kind, (message, [member.error for member in members]), attributes)


def _forms(error: BaseException | None) -> list[Any]:
    """Return the ways to pickle an exception, the best first."""
    if isinstance(error, ExceptionGroup):
        return [_GroupInParts, lambda one: one]
    if not isinstance(error, Exception):
        return [lambda one: one]
    return [_WithArgs if _is_made_of_args(error) else lambda one: one, _InParts]


def _pickled(error: BaseException | None) -> bytes | None:
    for form in _forms(error):
        with contextlib.suppress(BaseException), encoding(None):  # no references: the trial would count them twice
            data = pickle.dumps(form(error))
            unpickling.loads(data)
            return data
    return None


def _rebuild(data: bytes | None, text: str, note: str, notes: list[str]) -> Failure:
    try:
        error = None if data is None else unpickling.loads(data)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the class is unknown on this side, or behaves differently here
        error = None
    if error is None:
        error = _in_words(text)
    _set_notes(error, notes)  # a class with a __reduce__ of its own leaves them out
    return Failure(error, text, note)
