"""The transport of a forked process, in place of its parent's: every use is an error."""

import concurrent.futures
from collections.abc import Sequence
from typing import Any, NoReturn

from jdistgrad.errors import WorldClosedError
from jdistgrad.wire.message import Message
from jdistgrad.wire.transport import Receiver, Transport


class Severed:
    """A transport that cannot be used. It keeps the parent's transport alive, which must not be destroyed here."""

    def __init__(self, transport: Transport, why: str):
        self.rank, self.size, self.hands_over = transport.rank, transport.size, transport.hands_over
        self._transport, self._why = transport, why

    def start(self, receiver: Receiver) -> NoReturn:
        raise WorldClosedError(self._why)

    def send(self, peer: int, message: Message) -> NoReturn:
        raise WorldClosedError(self._why)

    def lose(self, peer: int) -> None:
        """Do nothing: nothing is sent from here."""

    def kill(self, peer: int) -> bool:
        """Do nothing: only the parent may kill."""
        return False

    def wait_for(self, futures: Sequence[concurrent.futures.Future[Any]], timeout: float | None) -> NoReturn:
        raise WorldClosedError(self._why)

    def look(self) -> None:
        """Do nothing: only the parent receives."""

    def serve_only(self, *, only: bool) -> None:
        """Do nothing: a forked process serves no calls."""

    def close(self, *, graceful: bool) -> None:
        """Do nothing: only the parent may close its transport."""
