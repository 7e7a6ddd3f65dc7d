"""Exceptions that cross workers: their own type, the remote traceback, and the chain of workers as notes.

An exception that cannot be pickled, or made again on the other side, arrives as a RemoteError with its text.
"""

import contextlib
import copy
import dataclasses
import io
import os
import pathlib
import pickle
import traceback
import types
from typing import Any

from jdistgrad.errors import RemoteError
from jdistgrad.rpc.by_value import ObjectPickler
from jdistgrad.rpc.claims import encoding

PACKAGE = str(pathlib.Path(__file__).parents[1]) + os.sep
SHORT = 160  # characters
SHOWN = 20  # frames at each end of a traceback: an endless recursion has a thousand between them


@dataclasses.dataclass(slots=True)
class Failure:
    """An exception on its way to the caller, with texts to use instead if it cannot be rebuilt."""

    error: BaseException | None
    spelled: str
    note: str

    def __reduce__(self) -> Any:
        return _received, (_pickled(self.error), self.spelled, self.note, list(getattr(self.error, "__notes__", [])))

    def to_raise(self) -> BaseException:
        """Return the exception for the caller to raise: a copy, since several callers may raise it.

        Besides, a new traceback of the object itself would keep the caller's values as long as the owner keeps it.
        """
        twin, own = None, self.error
        if isinstance(own, Exception):
            with contextlib.suppress(Exception):
                twin = _rebuilt(type(own), own.args, own.__dict__) if _is_made_of_args(own) else copy.copy(own)
        error = _in_words(self.spelled) if twin is None or twin is own else twin
        error.__notes__ = [*getattr(self.error, "__notes__", []), self.note]
        return error


def pack(error: BaseException, where: str) -> Failure:
    """Make an exception ready to travel; ``where`` says what was running, on which worker, called by whom."""
    found = list(traceback.extract_tb(error.__traceback__))
    ours = [frame.filename.startswith(PACKAGE) for frame in found]  # those first only lead to code of others
    frames = traceback.StackSummary.from_list(found[ours.index(False) :] if False in ours else found).format()
    if len(frames) > 2 * SHOWN:
        frames[SHOWN:-SHOWN] = [f"  ... {len(frames) - 2 * SHOWN} more ...\n"]
    text = "".join(frames).rstrip()
    failure = Failure(error, spelled(error), f"{where}\n{text}" if text else where)
    _let_go_of_frames(error)
    return failure


def spelled(error: BaseException) -> str:
    """Return an exception's type and text, without its notes."""
    kind = type(error)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.").removeprefix("__main__.")
    try:
        text = str(error)
    except Exception as raised:
        text = f"(asking for its text raised {type(raised).__name__})"
    return f"{name}: {text}" if text else name


def in_short(error: BaseException) -> str:
    """Return the first line of an exception's type and text, shortened."""
    text = spelled(error)
    line = text.split("\n", 1)[0][:SHORT]
    return line if line == text else f"{line} ..."


def _let_go_of_frames(error: BaseException | None) -> None:
    """Remove tracebacks, which keep every local variable of the failed call alive, including references."""
    found, seen = [error], set[int]()
    while found:
        one = found.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            found += [one.__cause__, one.__context__, *members]


def _is_made_of_args(error: BaseException) -> bool:
    """Return whether Python copies and pickles an exception as its class, to be called with ``args``, and attributes.

    An ``__init__`` may take others, or make a text of its argument: it would make another one of that text.
    """
    kind: Any = type(error)
    return isinstance(kind.__reduce__, types.MethodDescriptorType) and kind.__reduce_ex__ is object.__reduce_ex__


def _rebuilt(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    try:
        error = kind(*args)
    except Exception:  # its ``__init__`` takes other arguments
        error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class _ExceptionPickler(ObjectPickler):
    def found(self, value: Any) -> Any:
        if not (isinstance(value, BaseException) and _is_made_of_args(value)):
            return super().found(value)
        args = value.args
        if isinstance(value, BaseExceptionGroup):
            members = [one if _pickled(one) is not None else _in_words(spelled(one)) for one in value.exceptions]
            args = value.message, members
        return _rebuilt, (type(value), args, value.__dict__)


def _pickled(error: BaseException | None) -> bytes | None:
    stream = io.BytesIO()
    try:
        with encoding(None):  # no references: they would be counted twice
            _ExceptionPickler(stream).dump(error)
    except Exception:
        return None
    return stream.getvalue()


def _received(data: bytes | None, text: str, note: str, notes: list[str]) -> Failure:
    try:
        error = None if data is None else pickle.loads(data)
    except Exception:  # the class is unknown on this side, or behaves differently here
        error = None
    if error is None:
        error = _in_words(text)
    error.__notes__ = notes  # a class with a __reduce__ of its own leaves them out
    return Failure(error, text, note)


def _in_words(text: str) -> RemoteError:
    return RemoteError(f"the remote function raised {text}", remote_type=text)
