"""Methods of referenced values, called where the values live."""

from collections.abc import Callable
from typing import Any

from jdistgrad.rpc.functions import Args, Kwargs


class ByReference:
    """A wrapper of an RRef that arrives as a reference, not as its value."""

    __slots__ = ("rref",)

    def __init__(self, rref: Any):
        self.rref = rref

    @property
    def traced_part(self) -> Any:
        """Return the handle, which JAX may be tracing: a wrapped reference counts as traced too."""
        return getattr(self.rref, "traced_part", None)


class MethodCaller:
    """An object with the methods of a referenced value, which run on the value's owner."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: Any, call: Callable[..., Any], timeout: float | None):
        self._rref, self._call, self._timeout = rref, call, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            target = (ByReference(self._rref), name, args, kwargs)
            return self._call(self._rref.owner, call_method, target, {}, self._timeout)

        return method


def call_method(reference: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    """Call a method of a referenced value; runs on its owner."""
    return getattr(reference.local_value(), name)(*args, **kwargs)
