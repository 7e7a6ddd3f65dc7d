"""Pickling of arrays: a dtype, a shape, and bytes that travel out of band.

Reading a JAX CPU array makes no copy, and neither does making a JAX array of a large buffer that arrived. NumPy's own
pickling copies extension dtypes (bfloat16 and the like) and non-contiguous arrays in band; this module never does.

Arrays for compiled code on the other side (``ArrayBlock``) are sent as NumPy arrays, because making JAX arrays would
take longer. Small ones travel as one block of bytes. A note describes their places in the block; it is the same in
every run, so it is decoded only once.
"""

import contextlib
import functools
import math
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad._compat import array_of
from jdistgrad.errors import EncodingError

# Below this size, copying costs less than a second message; from it on, arrays alias the buffer they arrived in.
ALIAS_FROM = 1 << 16

EXTENSIONS_FROM = 256  # NumPy's own dtypes have lower numbers; characters of other dtypes may mean another type

ALIGNMENT = 16  # of arrays among other bytes
PADDINGS = [bytes(-length % ALIGNMENT) for length in range(ALIGNMENT)]

TRACED = (
    "a traced value has no data yet and cannot be sent to another worker inside an object that JAX does not look into. "
    "Pass it in a container that JAX knows: jax.tree_util.register_dataclass makes one of your class, and "
    "jax.tree_util.Partial is functools.partial as one."
)

PickleReduction = tuple[Callable[..., Any], tuple[Any, ...]]
Kinds = tuple[tuple[np.dtype, tuple[int, ...]], ...]


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """Return the text by which ``named_dtype`` finds a dtype without fields."""
    return dtype.name if dtype.num >= EXTENSIONS_FROM else dtype.str


named_dtype: Callable[[str], np.dtype] = functools.cache(jnp.dtype)


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the array's bytes in C order, as a view if the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def reduce_numpy(array: np.ndarray) -> Any:
    if array.dtype.hasobject or array.dtype.names or not array.itemsize:  # no bytes tell how many elements there are
        return NotImplemented
    buffer = pickle.PickleBuffer(bytes_of(array))
    if array.dtype.num < EXTENSIONS_FROM:
        return np.ndarray, (array.shape, array.dtype.str, buffer)
    return rebuild_numpy, (buffer, dtype_name(array.dtype), array.shape)


def rebuild_numpy(data: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.ndarray(shape, named_dtype(dtype), data)


def reduce_jax(array: jax.Array) -> PickleReduction:
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
        return rebuild_number, (array.item(), dtype_name(array.dtype))
    host = np.asarray(array)
    return rebuild_jax, (pickle.PickleBuffer(bytes_of(host)), dtype_name(host.dtype), host.shape)


def rebuild_number(value: complex, dtype: str) -> jax.Array:
    """Return a weakly typed scalar. Raises EncodingError if JAX here would make it narrower than where it came from."""
    check_kept(named_dtype(dtype), jax.dtypes.canonicalize_dtype(named_dtype(dtype)))
    return jnp.asarray(value)


def rebuild_key(data: jax.Array, impl: str) -> jax.Array:
    key: jax.Array = jax.random.wrap_key_data(data, impl=impl)
    return key


_rebuilding = threading.local()


@contextlib.contextmanager
def as_numpy(below: float = math.inf) -> Iterator[None]:
    """Make this thread rebuild JAX arrays of fewer bytes as NumPy arrays in the block.

    No JAX may run in XLA's callbacks; and what only compiled code takes is not worth making a small JAX array of.
    """
    _rebuilding.plain_below = below
    try:
        yield
    finally:
        _rebuilding.plain_below = 0


def rebuild_jax(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    host = rebuild_numpy(data, dtype, shape)
    if host.nbytes < getattr(_rebuilding, "plain_below", 0):
        return host
    if host.itemsize >= 8:
        check_kept(host.dtype, jax.dtypes.canonicalize_dtype(host.dtype))
    return array_of(host)


def as_jax_array(array: Any) -> jax.Array:
    """Return a JAX array that shares no writable memory with the given array.

    An array that came over the wire is not copied: it is read-only, and its memory is not NumPy's. NumPy makes the
    copy: JAX would make it later, if the device is busy.
    """
    if isinstance(array, jax.Array):
        return array
    if not isinstance(array, np.ndarray) or array.dtype != jax.dtypes.canonicalize_dtype(array.dtype):
        return jnp.array(array)
    return array_of(array.copy() if _may_change(array) else array)


def _may_change(array: Any) -> bool:
    """Return whether somebody may write to an array's memory: others may see NumPy's own through another array.

    Unlike ``may_be_written``, it looks at arrays only: what came over the wire is a view of a buffer for reuse.
    """
    while isinstance(array, np.ndarray):
        if array.flags.writeable or array.flags.owndata:
            return True
        array = array.base
    return False


def may_be_written(memory: Any) -> bool:
    """Return whether an array, or one that it is a view of, is NumPy's and writable. ``memory``: it, or its bytes."""
    while memory is not None:
        if isinstance(memory, np.ndarray) and memory.flags.writeable:
            return True
        memory = memory.obj if isinstance(memory, memoryview) else getattr(memory, "base", None)
    return False


def check_kept(sent: np.dtype, made: Any) -> None:
    """Raise EncodingError if JAX here made an array of another dtype than the one that was sent."""
    if made != sent:
        raise EncodingError(
            f"a {sent} array arrived on a worker whose JAX makes it {made}. "
            'Set jax.config.update("jax_enable_x64", True) on every worker or on none.'
        )


identity = jax.jit(lambda array: jnp.asarray(array))  # which makes it JAX's where ``jax.disable_jit`` is set


class ArrayBlock(list[Any]):
    """A list of arrays that arrive as NumPy arrays.

    A list with a random key, a weakly typed scalar or an array spread over processes travels as an ordinary list.
    """

    def __reduce__(self) -> Any:
        hosts = _hosts(self)
        if hosts is None:
            return list, (tuple(self),)
        note = _note(tuple([(one.dtype, one.shape) for one in hosts]))
        block = b"".join([one.tobytes() + PADDINGS[one.nbytes % ALIGNMENT] for one in hosts if one.nbytes < ALIAS_FROM])
        return arrived, (note, block, [pickle.PickleBuffer(bytes_of(one)) for one in hosts if one.nbytes >= ALIAS_FROM])


def _hosts(arrays: Sequence[Any]) -> list[np.ndarray] | None:
    """Return the arrays as NumPy arrays; None if one of them is more than its bytes in this process's memory."""
    try:
        if any(isinstance(one, jax.Array) and one.ndim == 0 and one.weak_type for one in arrays):
            return None
        return [np.asarray(one) if isinstance(one, jax.Array) else _as_jax_would(one) for one in arrays]
    except (AttributeError, TypeError, RuntimeError):  # a random key, a traced array ...: see ``reduce_jax``
        return None


def _as_jax_would(value: Any) -> np.ndarray:
    """Convert to an array of the dtype that JAX would use here. Raises TypeError if JAX has no such dtype."""
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.names:
        raise TypeError(f"JAX has no {array.dtype}")
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    return array if array.dtype == kept else array.astype(kept)


@functools.lru_cache(maxsize=4096)
def _note(kinds: Kinds) -> bytes:
    return "\n".join([" ".join([dtype_name(dtype), *map(str, shape)]) for dtype, shape in kinds]).encode()


@functools.lru_cache(maxsize=4096)
def _places(note: bytes) -> list[tuple[np.dtype, tuple[int, ...], slice | None]]:
    """Return dtype, shape and slice of the block for each array; the slice of a large array is None."""
    places, start = [], 0
    for line in note.decode().splitlines():
        name, *sizes = line.split()
        dtype, shape = named_dtype(name), tuple(map(int, sizes))
        size = dtype.itemsize * math.prod(shape)
        places.append((dtype, shape, slice(start, start + size) if size < ALIAS_FROM else None))
        if size < ALIAS_FROM:
            start += size + -size % ALIGNMENT
    return places


def arrived(note: bytes, block: bytes, large: list[Any]) -> list[Any]:
    """Rebuild the arrays from the note, the block of small arrays, and the large arrays."""
    data, rest, found = np.frombuffer(block, np.uint8), iter(large), []
    for dtype, shape, place in _places(note):
        if dtype.itemsize >= 8:
            check_kept(dtype, jax.dtypes.canonicalize_dtype(dtype))
        # That it is read-only, and its base no array, marks what came over the wire: see ``as_jax_array``.
        part = np.frombuffer(memoryview(next(rest)), np.uint8) if place is None else data[place]
        part.flags.writeable = False
        found.append(part.view(dtype).reshape(shape))
    return found
