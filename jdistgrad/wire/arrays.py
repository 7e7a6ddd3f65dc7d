"""Arrays as pickle sees them: a dtype, a shape, and bytes that travel out of band.

Reading a JAX CPU array is free of copies, and so is making one of a large buffer that arrived. NumPy's own pickle
support copies extension dtypes (bfloat16 and its kin) and non-contiguous arrays in band; this one never does.
"""

import contextlib
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.errors import EncodingError

# Below this, copying costs less than a second message; above it, arrays alias the buffer they came in.
ALIAS_FROM = 1 << 16

TRACED = (
    "a traced value has no data yet and cannot be sent to another worker. Make the call outside jax.jit and jax.grad."
)

# After so many arrivals of one kind of small array, a compiled identity makes the JAX array, in a third of the time.
# Compiling it takes as long as some hundred arrivals save, so it must be likely to pay.
COMPILE_FROM = 500
KINDS_COUNTED = 4096

Reduction = tuple[Callable[..., Any], tuple[Any, ...]]


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    return dtype.name if dtype.kind == "V" else dtype.str


@functools.cache
def named_dtype(name: str) -> np.dtype:
    return jnp.dtype(name)


def raw_bytes(array: np.ndarray) -> pickle.PickleBuffer:
    """The array's bytes in C order; a view where it is contiguous."""
    return pickle.PickleBuffer(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def reduce_numpy(array: np.ndarray) -> Any:
    if array.dtype.hasobject or array.dtype.names:
        return NotImplemented
    return rebuild_numpy, (raw_bytes(array), dtype_name(array.dtype), array.shape)


def rebuild_numpy(data: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(data, np.uint8).view(named_dtype(dtype)).reshape(shape)


def reduce_jax(array: jax.Array) -> Reduction:
    if isinstance(array, jax.core.Tracer):
        raise EncodingError(TRACED)
    if not array.is_fully_addressable:
        raise EncodingError(
            f"an array spread over several processes ({array.sharding}) cannot be sent to another worker. "
            "Send the part this process holds: array.addressable_data(0)."
        )
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return rebuild_key, (jax.random.key_data(array), str(jax.random.key_impl(array)))
    if array.weak_type and array.ndim == 0:
        return jnp.asarray, (array.item(),)
    host = np.asarray(array)
    return rebuild_jax, (raw_bytes(host), dtype_name(host.dtype), host.shape)


def rebuild_key(data: jax.Array, impl: str) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=impl)


_rebuilding = threading.local()


@contextlib.contextmanager
def as_numpy() -> Iterator[None]:
    """A block in which this thread rebuilds JAX arrays as NumPy ones: in XLA's callbacks no JAX may run."""
    _rebuilding.plain = True
    try:
        yield
    finally:
        _rebuilding.plain = False


def rebuild_jax(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    host = rebuild_numpy(data, dtype, shape)
    if getattr(_rebuilding, "plain", False):
        return host
    array = jax.device_put(host) if host.nbytes >= ALIAS_FROM else _small(host, (dtype, shape))
    check_kept(host.dtype, array.dtype)
    return array


def adopted(array: Any) -> jax.Array:
    """A JAX array of its own, of any array. Only what came over a wire, which nobody can write to, is not copied."""
    if isinstance(array, jax.Array):
        return array
    arrived = isinstance(array, np.ndarray) and not array.flags.writeable
    return jax.device_put(array) if arrived and array.nbytes >= ALIAS_FROM else jnp.array(array)


def check_kept(sent: np.dtype, made: Any) -> None:
    """Raises EncodingError where JAX here makes another type of an array that was sent."""
    if made != sent:
        raise EncodingError(
            f"a {sent} array arrived on a worker whose JAX makes it {made}. "
            'Set jax.config.update("jax_enable_x64", True) on every worker or on none.'
        )


_identity = jax.jit(lambda array: array)
_arrivals: dict[tuple[str, tuple[int, ...]], int] = {}


def _small(host: np.ndarray, kind: tuple[str, tuple[int, ...]]) -> jax.Array:
    seen = _arrivals.get(kind, 0)
    if seen >= COMPILE_FROM:
        return _identity(host)
    if seen or len(_arrivals) < KINDS_COUNTED:
        _arrivals[kind] = seen + 1
    return jnp.asarray(host)
