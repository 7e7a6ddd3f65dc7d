"""Methods of referenced values, called where the values live."""

from collections.abc import Callable
from typing import Any


class ByReference:
    """An RRef that shall arrive as a reference."""

    __slots__ = ("rref",)

    def __init__(self, rref: Any):
        self.rref = rref

    @property
    def traced_part(self) -> Any:
        """What JAX may be tracing of it: a reference counts as traced in here too."""
        return getattr(self.rref, "traced_part", None)


class MethodCaller:
    """Attribute access on it calls a method of a referenced value, on its owner."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: Any, call: Callable[..., Any], timeout: float | None):
        self._rref, self._call, self._timeout = rref, call, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            target = (ByReference(self._rref), name, args, kwargs)
            return self._call(self._rref.owner, call_method, target, {}, self._timeout)

        return method


def call_method(reference: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs on the owner."""
    return getattr(reference.local_value(), name)(*args, **kwargs)
