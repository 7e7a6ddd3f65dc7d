"""Agreement of a group's ranks on their next operation: each announces its own and compares it with the others'."""

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from jdistgrad.data_parallel.collectives import roll_call
from jdistgrad.data_parallel.collectives.roll_call import Act, Roll
from jdistgrad.data_parallel.collectives.world import InterruptedCollectiveError
from jdistgrad.errors import CollectiveError, DisagreementError, MissingRanksError, WorkerLostError


class Meeting:
    """A meeting that this rank has come to. Called with a timeout in seconds, it returns the words of all ranks."""

    def __init__(self, wait: Callable[[float], list[bytes]], is_complete: Callable[[], bool] = lambda: False):
        self._wait, self._is_complete = wait, is_complete

    def __call__(self, timeout: float) -> list[bytes]:
        return self._wait(timeout)

    def completes_within(self, seconds: float) -> bool:
        """Return whether all ranks come within ``seconds``. The wait spins, so the time must be short."""
        end = time.monotonic() + seconds
        while not self._is_complete():
            if time.monotonic() > end:
                return False
        return True


class Group(Protocol):
    """The ranks that agree, as seen by a rank. ``refusal``: the error that keeps them from meeting again, or None."""

    rank: int
    refusal: CollectiveError | None

    def announce(self, word: bytes, what: str) -> Meeting: ...

    def gather_objects(self, value: Any) -> list[Any]: ...


class Agreeing:
    """The agreement on one operation. Every rank must make one, and call it."""

    def __init__(self, collectives: Group, text: str):
        if collectives.refusal is not None:
            raise collectives.refusal
        self._collectives, self._text = collectives, text
        self._mine = Roll(Act.OPERATE, 0, 0, 0, _digest(text))
        self.meeting = collectives.announce(self._mine.pack(), text)

    def __call__(self, timeout: float) -> None:
        """Wait for all ranks to announce this operation.

        Raises:
          DisagreementError: the ranks announce different operations. All ranks raise it.
          MissingRanksError: some ranks have not come in time.
        """
        words = [roll_call.unpack(word) for word in self._words(timeout)]
        elsewhere = next((rank for rank, its in enumerate(words) if its.act is not Act.OPERATE), None)
        if elsewhere is not None:
            raise roll_call.disagreement(words, self._collectives.rank, elsewhere)
        if len(set(words)) > 1:
            self._raise_difference()

    def _words(self, timeout: float) -> list[bytes]:
        """Return the words of all ranks. If a rank does not come, refuse all further use of these collectives.

        That rank could still come late, and would then be one operation behind the others; and so would the others, if
        Ctrl-C ends the wait of this one.
        """
        try:
            return self.meeting(timeout)
        except (MissingRanksError, WorkerLostError, InterruptedCollectiveError) as error:
            self._refuse(str(error))
            raise
        except BaseException as error:
            self._refuse(f"{_named(error)} has ended the wait in {self._text}.")
            raise

    def _refuse(self, why: str) -> None:
        _refuse(self._collectives, self._text, why)

    def _raise_difference(self) -> None:
        said = self._collectives.gather_objects(self._text)
        other = next(rank for rank, its in enumerate(said) if its != said[0])
        raise DisagreementError(
            f"the ranks are not in the same operation: rank 0 does {said[0]}, rank {other} does {said[other]}. Every "
            "rank must call the same operations, in the same order, with the same shapes and dtypes.",
            rank=other,
        )


@contextlib.contextmanager
def undivided(collectives: Group, text: str) -> Iterator[None]:
    """Open a block of an operation. If Ctrl-C ends it, refuse further use: the others are at another place in it."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if collectives.refusal is None:
            _refuse(collectives, text, f"{_named(error)} has ended {text}.")
        raise


def _refuse(collectives: Group, text: str, why: str) -> None:
    collectives.refusal = CollectiveError(
        f"{text}: these collectives are not used any more, since {why} Make new ones, on every rank."
    )


def _named(error: BaseException) -> str:
    return "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__


@functools.lru_cache(maxsize=4096)
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
