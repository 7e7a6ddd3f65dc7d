"""The description of a leaf of a tree, the only one there need be: shape, dtype, weak type, and kind of random key.

A leaf travels as *plain* data over a wire, to files, through MPI and XLA's callbacks. The ``LeafSpec`` has the rest:
whether the dtype is weak, and the implementation of random keys.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad._compat import array_of, weakly_typed, x64_elsewhere
from jdistgrad.errors import EncodingError

EXTENSIONS_FROM = 256  # NumPy's own dtypes have lower numbers; characters of other dtypes may mean another type

canonical: Callable[[Any], Any] = jax.dtypes.canonicalize_dtype
named_dtype: Callable[[str], np.dtype] = functools.cache(jnp.dtype)


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """Return the text by which ``named_dtype`` finds a dtype without fields."""
    return dtype.name if dtype.num >= EXTENSIONS_FROM else dtype.str


@dataclasses.dataclass(frozen=True, slots=True)
class LeafSpec:
    """What an array is, but for its numbers.

    Attributes:
      dtype: of the plain data: of keys, that of their key data.
      weak: whether JAX treats the numbers like Python's, whose dtype gives way to that of others.
      impl: the implementation of random keys, as ``jax.random.wrap_key_data`` takes it; None if these are none.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    weak: bool = False
    impl: str | None = None

    @classmethod
    def of(cls, leaf: Any) -> "LeafSpec":
        """Describe an array of JAX, traced or not, or of NumPy, a ``jax.ShapeDtypeStruct``, or a number."""
        if is_key(leaf):
            return cls(leaf.shape, np.dtype(np.uint32), impl=str(jax.random.key_impl(leaf)))
        has_dtype = hasattr(leaf, "dtype")
        dtype = leaf.dtype if has_dtype else jax.dtypes.result_type(leaf)
        return cls(tuple(np.shape(leaf)), np.dtype(dtype), bool(getattr(leaf, "weak_type", not has_dtype)))

    def __str__(self) -> str:
        return f"{self.dtype if self.impl is None else f'key<{self.impl}>'}{list(self.shape)}"

    def zeros(self) -> Any:
        """Return numbers that are zeros, not keys; as JAX's where they are weak."""
        assert self.impl is None
        made = np.zeros(self.shape, self.dtype)
        return weakly_typed(made) if self.weak else made

    def restored(self, plain: Any) -> Any:
        """Return the leaf that has these plain data. Raises EncodingError if JAX here has no such dtype."""
        if self.impl is not None:
            return jax.random.wrap_key_data(plain, impl=self.impl)
        array = as_jax_array(plain)
        check_kept(self.dtype, array.dtype)
        return weakly_typed(array) if self.weak else array


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of random keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def plain(leaf: Any) -> Any:
    """Return the plain data of a leaf: of random keys their key data, of all else the leaf itself."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def check_kept(sent: np.dtype, made: Any) -> None:
    """Raise EncodingError if JAX here made an array of another dtype than the one that was sent."""
    if made != sent:
        raise EncodingError(
            f"a {sent} array arrived on a worker whose JAX makes it {made}. "
            'Set jax.config.update("jax_enable_x64", True) on every worker or on none.'
        )


def check_kept_elsewhere(leaves: Iterable[Any]) -> None:
    """Raise EncodingError for JAX arrays with more bits than those of this process's other threads have."""
    x64 = x64_elsewhere()
    if x64 is None:
        return
    with jax.enable_x64(x64):
        for leaf in leaves:
            if isinstance(leaf, jax.Array) and isinstance(leaf.dtype, np.dtype):
                check_kept(leaf.dtype, jax.dtypes.canonicalize_dtype(leaf.dtype))


def as_jax_array(array: Any) -> jax.Array:
    """Return a JAX array that shares no writable memory with the given array.

    An array that came over the wire is not copied: it is read-only, and its memory is not NumPy's. NumPy makes the
    copy: JAX would make it later, if the device is busy.
    """
    if isinstance(array, jax.Array):
        return array
    if not isinstance(array, np.ndarray) or array.dtype.names or array.dtype.str != canonical(array.dtype).str:
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
