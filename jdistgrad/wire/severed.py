"""What a forked process has in place of its parent's transport: every use is an error."""

import concurrent.futures
from collections.abc import Sequence
from typing import NoReturn

from jdistgrad.errors import WorldClosedError
from jdistgrad.wire.message import Message
from jdistgrad.wire.transport import Receiver, Transport


class Severed:
    """Keeps the transport it stands for: nothing of that may be cleared away here either."""

    def __init__(self, transport: Transport, why: str):
        self.rank, self.size, self.hands_over = transport.rank, transport.size, transport.hands_over
        self._transport, self._why = transport, why

    def start(self, receiver: Receiver) -> NoReturn:
        raise WorldClosedError(self._why)

    def send(self, peer: int, message: Message, *, snapshot: bool = True) -> NoReturn:
        raise WorldClosedError(self._why)

    def wait_for(self, futures: Sequence[concurrent.futures.Future], timeout: float | None) -> NoReturn:
        raise WorldClosedError(self._why)

    def serve_only(self, only: bool) -> None:
        """Nobody serves."""

    def close(self, *, graceful: bool) -> None:
        """It is the parent's to close."""
