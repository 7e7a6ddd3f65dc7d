"""Single messages that are lost, come late or twice, or cannot be sent, by kind: a named error, or the right number."""

import random
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from helpers.unruly import Fate, Fates, make_unruly

import jdistgrad as jd
from faults.outcomes import Outcome, patience
from faults.program import driven, judged
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.inbox import Inbox
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.message import ANSWERS, Kind

TIMEOUT = 0.2
LOST, HARMLESS = Fate.DROPPED, (Fate.LATE, Fate.TWICE)
KINDS = Kind.CALL, Kind.REMOTE, Kind.RESULT, Kind.FAILURE, Kind.PUSH
ERRORS: dict[Kind, type[Exception]] = {Kind.RESULT: jd.EncodingError, Kind.FAILURE: jd.RemoteError}

_fates: list[Fates] = []
_served: list[int] = []


class OddError(Exception):
    """The error of the remote function."""


def meet(fate: Fate, kind: Kind, peer: int) -> None:
    """Let this worker's next message of a kind have a fate. A lost one counts as not sent: so the world gets quiet."""
    if not _fates:
        _fates.append(make_unruly())
    _fates[0].ask(fate, kind)
    if fate is LOST:
        current_worker().work.not_sent(kind, peer)


def twice(x: int) -> int:
    _served.append(x)
    return 2 * x


def served(x: int) -> int:
    return _served.count(x)


def announce(identifier: int) -> None:
    """Note that a value is being made. An owner waits for ever for the message that makes it, since MPI loses none."""
    current_worker().references.announce(identifier)


def answer(fate: Fate, kind: Kind, x: int) -> int:
    meet(fate, kind, 0)
    if kind is Kind.FAILURE:
        raise OddError(x)
    return twice(x)


def taken(key: tuple[int], seconds: float) -> Any:
    def wait(futures: Any) -> None:
        current_worker().wait_for(futures, seconds)
        futures[0].result(seconds)

    return current_scope().content(Inbox).take(key, current_worker().transport.look, wait)


def send(fate: Fate, kind: Kind, peer: int, x: int, seconds: float) -> Any:
    """Send something in a message that has a fate; return what came of it."""
    if kind in ANSWERS:
        return jd.rpc_sync(peer, answer, args=(fate, kind, x), timeout=seconds)
    meet(fate, kind, peer)
    if kind is Kind.CALL:
        return jd.rpc_sync(peer, twice, args=(x,), timeout=seconds)
    if kind is Kind.REMOTE:
        made = jd.remote(peer, twice, args=(x,), timeout=seconds)
        if fate is LOST:
            jd.rpc_sync(peer, announce, args=(made.id,))
        made.creation().result()
        return made.to_here()
    with jd.context():
        current_worker().push(peer, (x,), jnp.full(3, 2 * x))
        return int(jd.rpc_sync(peer, taken, args=((x,), seconds))[0])


def broken_promise(fate: Fate, kind: Kind, peer: int, x: int) -> str:
    """Let one message meet its fate; return how what came of it is not as promised."""
    expected = promised(fate, kind)
    seconds = TIMEOUT if fate is LOST else 30 * patience()
    try:
        found = send(fate, kind, peer, x, seconds)
    except Exception as error:
        if expected is None or not isinstance(error, expected) or not named(error, fate, kind):
            return f"{type(error).__name__}: {error}"
    else:
        if expected is not None or found != 2 * x:
            return f"no {expected}, but {found}"
    times = jd.rpc_sync(peer, served, args=(x,))
    left = len(current_worker().calls)
    return f"served {times} times" if times > 1 else f"{left} calls are left" if left else ""


def promised(fate: Fate, kind: Kind) -> type[Exception] | None:
    """Return the type of the error that a message's fate brings, if any."""
    if fate in HARMLESS:
        return OddError if kind is Kind.FAILURE else None
    if fate is LOST:
        return TimeoutError
    return ERRORS.get(kind, jd.WireError)


def named(error: Exception, fate: Fate, kind: Kind) -> bool:
    """Return whether an error names the call and the worker, where there is a call."""
    if fate in HARMLESS or kind in (Kind.PUSH, Kind.FAILURE):
        return True
    called = "answer" if kind is Kind.RESULT else "twice"
    return called in str(error) and "(rank " in str(error)


def play(chance: random.Random, count: int) -> Iterator[Outcome]:
    def drive() -> Iterator[Outcome]:
        for number in range(count):
            fate, kind = chance.choice(list(Fate)), chance.choice(KINDS)
            peer = chance.randrange(1, jd.world_size())
            problem = broken_promise(fate, kind, peer, number)
            if jd.rpc_sync(peer, twice, args=(-1,)) != -2:
                problem += "; the next call was wrong"
            yield judged(f"{kind.name} {fate.value}", problem, named=promised(fate, kind) is not None)

    return driven(count, drive)
