"""Where traced values meet calls. What a derivative of a call is, a layer above knows: it installs itself here."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad._compat import trace_state_clean
from jdistgrad.errors import EncodingError
from jdistgrad.rpc import trees


class Boundary(Protocol):
    """Takes over calls of which JAX traces something."""

    def rpc_sync(self, to: Any, function: Any, args: tuple, kwargs: dict, timeout: float | None) -> Any: ...

    def rpc_async(self, to: Any, function: Any, args: tuple, kwargs: dict, timeout: float | None) -> Any: ...

    def remote(self, to: Any, function: Any, args: tuple, kwargs: dict, timeout: float | None) -> Any: ...

    def fetch(self, rref: Any, timeout: float | None) -> Any: ...

    def own(self, value: Any) -> Any: ...


_boundary: Boundary | None = None


def install(boundary: Boundary) -> None:
    global _boundary
    _boundary = boundary


def boundary_for(*values: Any) -> Boundary | None:
    """Who takes over a call with these arguments; None where JAX traces nothing: the common case, quickly."""
    if trace_state_clean() or not (any(is_traced(leaf) for leaf in trees.leaves(values)) or staging()):
        return None
    return _boundary


def is_traced(leaf: Any) -> bool:
    """Whether a leaf (a reference counts as one) is traced."""
    return isinstance(getattr(leaf, "traced_part", leaf), jax.core.Tracer)


def staging() -> bool:
    """Whether even operations on constants are being staged out: inside jit, scan and the like."""
    return isinstance(jnp.zeros((), np.int32), jax.core.Tracer)


def refuse_traced(what: str) -> EncodingError:
    return EncodingError(
        f"{what}: a traced value has no data yet and cannot be sent to another worker like this. Inside jax.grad and "
        "jax.jit, pass it as an argument of rpc_sync, rpc_async or remote, in containers JAX knows."
    )
