"""Values that are sent often and never change."""

import functools
import io
import pickle
from typing import Any, Generic, TypeVar

from jdistgrad.rpc import functions
from jdistgrad.rpc.shipments import encoding

T = TypeVar("T")


class Frozen(Generic[T]):
    """A value that is sent often and never changes, without references: encoded once, and decoded once."""

    def __init__(self, value: T):
        self.value = value
        self._streams: dict[type, bytes] = {}

    def stream(self, pickler: Any) -> bytes:
        """Its encoding by picklers of this one's kind, which is told of a function that cannot be encoded."""
        kind = type(pickler)
        if kind not in self._streams:
            stream = io.BytesIO()
            inner = kind(stream, protocol=5)
            try:
                with encoding(None):
                    inner.dump(self.value)
            except BaseException:
                pickler.last_function = inner.last_function
                raise
            self._streams[kind] = stream.getvalue()
        return self._streams[kind]


def thawed(stream: bytes) -> Frozen:
    """What arrived, decoded if it has not been seen before."""
    return _thawed(stream, functions.registrations())


@functools.lru_cache(maxsize=4096)
def _thawed(stream: bytes, registrations: int) -> Frozen:
    return Frozen(pickle.loads(stream))
