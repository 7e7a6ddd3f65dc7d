"""Pickling of arrays: a dtype, a shape, and bytes that travel out of band.

Reading a JAX CPU array makes no copy, and neither does making a JAX array of a large buffer that arrived. NumPy's own
pickling copies extension dtypes (bfloat16 and the like) and non-contiguous arrays in band; this module never does.

Arrays for compiled code on the other side (``ArrayBlock``) are sent as NumPy arrays, because making JAX arrays would
take longer.
"""

import contextlib
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad._compat import array_of
from jdistgrad.errors import EncodingError
from jdistgrad.leaves import EXTENSIONS_FROM, LeafSpec, canonical, check_kept, dtype_name, is_key, named_dtype, plain

# Below this size, copying costs less than a second message; larger arrays alias the buffer they arrived in.
ALIAS_FROM = 1 << 16

ALIGNMENT = 16  # of arrays among other bytes
PADDINGS = [bytes(-length % ALIGNMENT) for length in range(ALIGNMENT)]

TRACED = (
    "a traced value has no data yet and cannot be sent to another worker inside an object that JAX does not look into. "
    "Pass it in a container that JAX knows: jax.tree_util.register_dataclass makes one of your class, and "
    "jax.tree_util.Partial is functools.partial as one."
)

PickleReduction = tuple[Callable[..., Any], tuple[Any, ...]]


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the array's bytes in C order, as a view if the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def reduce_numpy(array: np.ndarray) -> Any:
    if array.dtype.hasobject or array.dtype.names or not array.itemsize:
        return NotImplemented
    buffer = pickle.PickleBuffer(bytes_of(array))
    if array.dtype.num < EXTENSIONS_FROM and array.nbytes < ALIAS_FROM:
        return np.ndarray, (array.shape, array.dtype.str, buffer)
    return rebuild_numpy, (buffer, dtype_name(array.dtype), array.shape)


def rebuild_numpy(data: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    # By its base, a view of memory and no array, ``as_jax_array`` knows that it came over the wire.
    return np.frombuffer(data, np.uint8).view(named_dtype(dtype)).reshape(shape)


def reduce_jax(array: jax.Array) -> PickleReduction:
    if isinstance(array, jax.core.Tracer):
        raise EncodingError(TRACED)
    if not array.is_fully_addressable:
        raise EncodingError(
            f"an array spread over several processes ({array.sharding}) cannot be sent to another worker. "
            "Send the part this process holds: array.addressable_data(0)."
        )
    if is_key(array):
        return LeafSpec.restored, (LeafSpec.of(array), plain(array))
    if array.weak_type and array.ndim == 0:
        return rebuild_number, (array.item(), dtype_name(array.dtype))
    host = np.asarray(array)
    return rebuild_jax, (pickle.PickleBuffer(bytes_of(host)), dtype_name(host.dtype), host.shape)


def rebuild_number(value: complex, dtype: str) -> jax.Array:
    """Return a weakly typed scalar. Raises EncodingError if its dtype would be narrower here than at the sender."""
    sent = named_dtype(dtype)
    check_kept(sent, canonical(sent))
    return jnp.asarray(value)


_rebuilding = threading.local()


@contextlib.contextmanager
def as_numpy(below: float = math.inf) -> Iterator[None]:
    """Rebuild JAX arrays of fewer bytes as NumPy arrays in the block, on this thread.

    No JAX may run in XLA's callbacks; and for arguments of compiled code a small JAX array is not worth its cost.
    """
    _rebuilding.plain_below = below
    try:
        yield
    finally:
        _rebuilding.plain_below = 0


def rebuild_jax(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    host = np.ndarray(shape, named_dtype(dtype), data)
    if host.nbytes < getattr(_rebuilding, "plain_below", 0):
        return rebuild_numpy(data, dtype, shape)
    if host.itemsize >= 8:
        check_kept(host.dtype, canonical(host.dtype))
    return array_of(host)


identity = jax.jit(lambda array: jnp.asarray(array))  # which makes it JAX's where ``jax.disable_jit`` is set


class ArrayBlock(list[Any]):
    """A list of arrays that arrive as NumPy arrays: for compiled code, making JAX arrays would take longer.

    Random keys, weakly typed scalars and arrays spread over processes arrive as they are.
    """

    def hosts(self) -> list[Any]:
        return list(map(_host, self))

    def __reduce__(self) -> Any:
        return arrived, (self.hosts(),)


def arrived(arrays: list[Any]) -> list[Any]:
    """Return the arrays of a block. Raises EncodingError if JAX here has no such dtype."""
    for array in arrays:
        if array.dtype.itemsize >= 8 and isinstance(array, np.ndarray):
            check_kept(array.dtype, canonical(array.dtype))
    return arrays


def _host(array: Any) -> Any:
    """Return an array as a NumPy array of JAX's dtype for it, unless it is more than its bytes."""
    if isinstance(array, jax.Array):
        try:
            return array if array.weak_type and not array.ndim else np.asarray(array)
        except (AttributeError, TypeError, RuntimeError):  # a random key, a tracer ...: see ``reduce_jax``
            return array
    host = np.asarray(array)
    if host.dtype.hasobject or host.dtype.names:  # JAX has no such dtype
        return array
    kept = host.astype(canonical(host.dtype), copy=False).view()
    kept.flags.writeable = False  # it arrives so: see ``as_jax_array``
    return kept
