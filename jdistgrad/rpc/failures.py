"""Exceptions that cross workers: their own type, the remote traceback, and the chain of workers as notes."""

import copy
import dataclasses
import pickle
import traceback
from typing import Any

from jdistgrad.errors import RemoteError
from jdistgrad.rpc.shipments import encoding


@dataclasses.dataclass(slots=True)
class Failure:
    """An exception on its way to the caller, with what to fall back on where it cannot be rebuilt."""

    error: BaseException | None
    spelled: str
    note: str

    def __reduce__(self) -> Any:
        return _rebuild, (_pickled(self.error), self.spelled, self.note, getattr(self.error, "__notes__", []))

    def to_raise(self) -> BaseException:
        """The exception for the caller; called once for each caller."""
        if not isinstance(self.error, Exception):
            error: BaseException = RemoteError(f"the remote function raised {self.spelled}", remote_type=self.spelled)
            for note in getattr(self.error, "__notes__", []):
                error.add_note(note)
        else:
            error = _copied(self.error)
        error.add_note(self.note)
        return error


def pack(error: BaseException, where: str) -> Failure:
    """Make an exception ready to travel; ``where`` says what was running, on which worker, called by whom."""
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    spelled = "".join(traceback.format_exception_only(type(error), error)).strip()
    _let_go_of_frames(error)
    return Failure(error, spelled, f"{where}\n{frames}" if frames else where)


def _let_go_of_frames(error: BaseException | None) -> None:
    """Tracebacks keep every local variable of the failed call alive, the references among them."""
    found, seen = [error], set[int]()
    while found:
        one = found.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            found += [one.__cause__, one.__context__]


def _copied(error: Exception) -> Exception:
    """A copy to raise: one exception may be raised for several callers, each adding its own traceback and notes."""
    try:
        twin = copy.copy(error)
        twin.__notes__ = list(getattr(error, "__notes__", []))
        return twin
    except Exception:  # a type whose __init__ wants other arguments: raise the very object
        return error


def _pickled(error: BaseException | None) -> bytes | None:
    try:
        with encoding(None):  # it may not hold references: the trial would count them twice
            data = pickle.dumps(error)
            pickle.loads(data)
    except Exception:  # whatever a user's class does in there, the caller must get an answer
        return None
    return data


def _rebuild(data: bytes | None, spelled: str, note: str, notes: list[str]) -> Failure:
    try:
        error = None if data is None else pickle.loads(data)
    except Exception:  # the class is not known on this side
        error = None
    if error is None:
        error = RemoteError(f"the remote function raised {spelled}", remote_type=spelled)
    error.__notes__ = list(notes)  # a type with a __reduce__ of its own leaves them out
    return Failure(error, spelled, note)
