"""The calls that a worker is serving: which function, for whom, since when."""

import time
from typing import TYPE_CHECKING

from jdistgrad.rpc.members.termination import Serving

if TYPE_CHECKING:
    from jdistgrad.rpc.calls.server import Served


class BeingServed:
    """Entered when a call is opened, left when it is answered. Safe from any thread."""

    def __init__(self) -> None:
        self._calls: dict[int, Served] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, call: "Served") -> None:
        self._calls[id(call)] = call

    def leave(self, call: "Served") -> None:
        self._calls.pop(id(call), None)

    def shown(self) -> tuple[Serving, ...]:
        """All of them, the oldest first."""
        now = time.monotonic()
        return tuple(Serving(_name(one), one.message.source, now - one.since) for one in list(self._calls.values()))


def _name(call: "Served") -> str:
    try:
        return str(call)
    except Exception:  # the name is asked of the user's function
        return f"a {type(call.function).__name__}"
