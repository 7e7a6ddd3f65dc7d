"""Values that are sent often and never change, encoded once and decoded once."""

import functools
import pickle
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Cached(Generic[T]):
    """A value made of the package's own classes, numbers and strings, without functions or objects of users.

    A user's function or class may change, or be defined anew under the same name, so it must not be cached.
    """

    def __init__(self, value: T):
        self.value = value

    @functools.cached_property
    def stream(self) -> bytes:
        return pickle.dumps(self.value, protocol=5)

    def __reduce__(self) -> Any:
        return from_cache, (self.stream,)


@functools.lru_cache(maxsize=4096)
def from_cache(stream: bytes) -> Cached[Any]:
    """Return the value that arrived, decoded only if it has not been seen before."""
    return Cached(pickle.loads(stream))
