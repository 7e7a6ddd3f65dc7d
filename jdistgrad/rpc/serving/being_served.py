"""The calls that a worker is serving: function, caller and duration of each."""

import threading
import time
from typing import Any, NamedTuple, Protocol

from jdistgrad.wire.message import Message


class Serving(NamedTuple):
    """A call that a worker is serving: its function, the caller's rank, and for how many seconds."""

    function: str
    caller: int
    seconds: float


class UnderWay(Protocol):
    """A call that is being served; ``str`` of it gives the function's name."""

    message: Message
    function: Any
    since: float
    thread: int


class BeingServed:
    """The table of calls being served, from opening a call to its answer. Safe from any thread."""

    def __init__(self) -> None:
        self._calls: dict[int, UnderWay] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, call: UnderWay) -> None:
        self._calls[id(call)] = call

    def leave(self, call: UnderWay) -> None:
        self._calls.pop(id(call), None)

    def on_this_thread(self) -> list[Any]:
        """Return the calls whose functions run on this thread."""
        return [call for call in self.now() if call.thread == threading.get_ident()]

    def now(self) -> list[Any]:
        """Return all calls being served, the oldest first."""
        return list(self._calls.values())

    def shown(self) -> tuple[Serving, ...]:
        """Return all calls being served, the oldest first."""
        now = time.monotonic()
        return tuple(Serving(name_of(one), one.message.source, now - one.since) for one in self.now())


def name_of(call: UnderWay) -> str:
    try:
        return str(call)
    except Exception:  # the user's callable computes its name
        return f"a {type(call.function).__name__}"
