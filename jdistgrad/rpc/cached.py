"""Values that are sent often and never change: encoded once, and decoded once."""

import functools
import pickle
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Cached(Generic[T]):
    """A value of the package's own classes, of numbers and strings: neither functions nor objects of users.

    What users define may change, or be defined anew under the same name: it has no place in here.
    """

    def __init__(self, value: T):
        self.value = value

    @functools.cached_property
    def stream(self) -> bytes:
        return pickle.dumps(self.value, protocol=5)

    def __reduce__(self) -> Any:
        return from_cache, (self.stream,)


@functools.lru_cache(maxsize=4096)
def from_cache(stream: bytes) -> Cached:
    """What arrived, decoded if it has not been seen before."""
    return Cached(pickle.loads(stream))
