"""The calls that a worker is serving: which function, for whom, since when."""

import time
from typing import Any, NamedTuple, Protocol

from jdistgrad.wire.message import Message


class Serving(NamedTuple):
    """One call that a worker is serving: its function, the caller's rank, and for how many seconds."""

    function: str
    caller: int
    seconds: float


class UnderWay(Protocol):
    """A call that is being served; its text is its function's name."""

    message: Message
    function: Any
    since: float


class BeingServed:
    """Entered when a call is opened, left when it is answered. Safe from any thread."""

    def __init__(self) -> None:
        self._calls: dict[int, UnderWay] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, call: UnderWay) -> None:
        self._calls[id(call)] = call

    def leave(self, call: UnderWay) -> None:
        self._calls.pop(id(call), None)

    def shown(self) -> tuple[Serving, ...]:
        """All of them, the oldest first."""
        now = time.monotonic()
        return tuple(Serving(_name(one), one.message.source, now - one.since) for one in list(self._calls.values()))


def _name(call: UnderWay) -> str:
    try:
        return str(call)
    except Exception:  # the name is asked of the user's function
        return f"a {type(call.function).__name__}"
