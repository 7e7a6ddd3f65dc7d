"""The roll call: the words that ranks exchange before each collective, and errors if they do not match.

A few dozen bytes from every rank, before any gradient moves, show that all ranks are there, at the same bucket of the
same plan, in the same kind of ``join`` block, with finite gradients where ``check_finite`` is set, and which ranks have
run out of inputs. A mismatch raises an error on every rank.
"""

import contextlib
import enum
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jdistgrad.errors import CollectiveError, DisagreementError, MissingRanksError, WorkerLostError
from jdistgrad.rpc.meetings import Meeting

_FORMAT = struct.Struct("<2i3qQ")


class Act(enum.IntEnum):
    """The action that a rank announces."""

    SHADOW = 0  # the rank has run out of inputs and follows the others, with zeros
    AGREE = 1
    REDUCE = 2
    USED = 3
    BROADCAST = 4
    VERIFY = 5
    OPERATE = 6  # a collective operation that is not the reducer's, in a hook for example
    FAILED = 7  # the rank's step has failed
    AVERAGE = 8  # gradients that the user passes to be averaged, usually accumulated ones


class Joining(enum.IntEnum):
    """The kind of ``join`` block a rank is in, which determines the divisor of gradients."""

    NONE = 0  # in no block: divide by the number of all ranks
    BY_ALL = 1
    BY_ACTIVE = 2

    def __str__(self) -> str:
        if self is Joining.NONE:
            return "in no join block"
        return f"in join(divide_by_initial_world_size={self is Joining.BY_ALL})"


class Roll(NamedTuple):
    """The word of a rank.

    Attributes:
      number: the act's argument: the bucket, the root, or the number of parameters.
      fault: 0, or 1 plus the place in its bucket of the first non-finite leaf. Over devices the digest of the rank's
        program.
    """

    act: Act
    step: int
    number: int
    fault: int
    digest: int
    joining: Joining = Joining.NONE

    def pack(self) -> bytes:
        return _FORMAT.pack(self.act, self.joining, self.step, self.number, self.fault, self.digest)

    def __str__(self) -> str:
        doing = {
            Act.SHADOW: "has joined, and answers only steps and averages of that DataParallel,",
            Act.AGREE: "meets a new tree of gradients",
            Act.REDUCE: f"reduces bucket {self.number}",
            Act.USED: "shares which parameters it used",
            Act.BROADCAST: "broadcasts",
            Act.VERIFY: "verifies parameters",
            Act.OPERATE: "is in a collective operation",
            Act.FAILED: f"has failed at bucket {self.number}",
            Act.AVERAGE: f"reduces bucket {self.number} of given gradients",
        }[self.act]
        return doing if self.act is Act.OPERATE else f"{doing} in step {self.step}"


class RollCall(NamedTuple):
    """The words of all ranks, which match. ``leader``: the lowest rank still active; None if all have joined."""

    rolls: tuple[Roll, ...]
    active: tuple[int, ...]

    @property
    def leader(self) -> int | None:
        return self.active[0] if self.active else None

    @property
    def divisor(self) -> int:
        """The divisor of gradients."""
        by_active = self.leader is not None and self.rolls[self.leader].joining is Joining.BY_ACTIVE
        return len(self.active) if by_active else len(self.rolls)


OPERATE = Roll(Act.OPERATE, 0, 0, 0, 0).pack()  # the description of the operation follows


def unpack(word: bytes) -> Roll:
    act, joining, step, number, fault, digest = _FORMAT.unpack_from(word)
    return Roll(Act(act), step, number, fault, digest, Joining(joining))


def read_words(words: Sequence[bytes]) -> RollCall:
    """Read the words of all ranks.

    Raises:
      DisagreementError: ranks are in different kinds of ``join`` blocks; or the active ranks are not at the same place;
        or some ranks have joined, and the others do what a joined rank cannot follow.
    """
    rolls = tuple(unpack(word) for word in words)
    going_on = [rank for rank, roll in enumerate(rolls) if roll.act is not Act.FAILED]  # a rank may fail after a block
    for rank in going_on:
        first_of = going_on[0]
        if rolls[rank].joining is not rolls[first_of].joining:
            raise _diverged(f"rank {first_of} is {rolls[first_of].joining}, rank {rank} {rolls[rank].joining}", rank)
    active = tuple(rank for rank, roll in enumerate(rolls) if roll.act is not Act.SHADOW)
    if active:
        first = rolls[active[0]]
        for rank in active:
            if _place(rolls[rank]) != _place(first):
                raise disagreement(rolls, active[0], rank)
        joined = next((rank for rank, roll in enumerate(rolls) if roll.act is Act.SHADOW), None)
        if joined is not None and first.act in (Act.BROADCAST, Act.VERIFY):
            raise disagreement(rolls, active[0], joined)
    return RollCall(rolls, active)


def _place(roll: Roll) -> tuple[Act, int, int]:
    """Return what must be equal. The step only counts for reductions and failures; a step may fail at any bucket."""
    number = 0 if roll.act is Act.FAILED else roll.number
    return roll.act, number, roll.step if roll.act in (Act.REDUCE, Act.AVERAGE, Act.FAILED) else 0


def disagreement(rolls: Sequence[Roll], first: int, other: int) -> DisagreementError:
    """Return the error that two of the ranks are not at the same place."""
    error = _diverged(f"rank {first} {rolls[first]}, rank {other} {rolls[other]}", other)
    error.failed = frozenset(rank for rank, roll in enumerate(rolls) if roll.act is Act.FAILED)
    return error


def _diverged(how: str, rank: int) -> DisagreementError:
    return DisagreementError(
        f"the ranks diverged: {how}; nothing was reduced. Every rank must take the same steps on the same trees of "
        "gradients, also under no_sync; if some have fewer inputs, use DataParallel.join() on every rank, with the "
        "same arguments. Create a new DataParallel on every rank (for average_gradients and local_sgd, call init "
        "again on every rank).",
        rank=rank,
    )


def announce(collectives: Any, text: str) -> Meeting:
    """Announce an operation to the other ranks. Raises if the group is closed."""
    if collectives.refusal is not None:
        raise collectives.refusal
    meeting: Meeting = collectives.members.begin(OPERATE + text.encode(), text)
    return meeting


def agree(collectives: Any, text: str, timeout: float, meeting: Meeting | None = None) -> None:
    """Wait for all ranks to announce this operation. If one does not, close the group: that rank may come late.

    Arguments:
      collectives: the group, with ``members``, ``rank`` and ``refusal``.
      meeting: of this operation, if this rank has announced it already.

    Raises:
      DisagreementError: the ranks announce different operations. All ranks raise it.
      MissingRanksError: some ranks have not come in time.
    """
    with undivided(collectives, text):
        meeting = meeting or announce(collectives, text)
        try:
            words = meeting.wait(timeout)
        except Exception as error:
            _close(collectives, text, error)
            raise
        if words.count(words[0]) == len(words):
            return
        rolls = [unpack(word) for word in words]
        elsewhere = next((rank for rank, its in enumerate(rolls) if its.act is not Act.OPERATE), None)
        if elsewhere is not None:
            raise disagreement(rolls, collectives.rank, elsewhere)
        require_same_texts([word[len(OPERATE) :].decode() for word in words])


def require_same_texts(said: Sequence[str]) -> None:
    """Raise DisagreementError unless all ranks describe their operation alike."""
    other = next((rank for rank, its in enumerate(said) if its != said[0]), None)
    if other is not None:
        raise DisagreementError(
            f"the ranks are not in the same operation: rank 0 does {said[0]}, rank {other} does {said[other]}. "
            "Every rank must call the same operations, in the same order, with the same shapes and dtypes.",
            rank=other,
        )


@contextlib.contextmanager
def undivided(collectives: Any, text: str) -> Iterator[None]:
    """Close the group if Ctrl-C or a timeout ends the block, an operation; notify the other ranks of Ctrl-C."""
    try:
        yield
    except BaseException as error:
        ended = not isinstance(error, Exception)
        if (ended or isinstance(error, MissingRanksError)) and collectives.refusal is None:
            _close(collectives, text, error)
            if ended:
                with contextlib.suppress(Exception):  # the world may have failed
                    collectives.members.leave(type(error).__name__)
        raise


def _close(collectives: Any, text: str, error: BaseException) -> None:
    name = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__
    why = str(error) if isinstance(error, CollectiveError | WorkerLostError) else f"{name} has ended {text}."
    collectives.refusal = CollectiveError(
        f"{text}: this group was closed, because {why} Create new collectives on every rank."
    )
