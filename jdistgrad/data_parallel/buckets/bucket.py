"""Buckets as the reduction and the hooks see them, and division by a number of ranks.

XLA turns a division by a constant into a multiplication by its rounded reciprocal. So that compiled code gets the bits
that Python gets, it divides by what XLA cannot know, because it depends on the array. A primitive of its own keeps the
division linear for JAX.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jdistgrad.data_parallel.buckets.leaves import Leaf

CHUNK = 2 << 20  # bytes: a huge page. Averaging 64 MiB takes 10 ms in chunks; in place it took 15 to 20 ms


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A leaf's place in its bucket: ``length`` elements from ``offset``."""

    index: int
    path: str
    offset: int
    length: int
    shape: tuple[int, ...]


Part = tuple[int, slice, slice]  # a slot of a bucket, a slice of its leaf, and the place of that in a chunk


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that are reduced together.

    A hook gets the bucket with ``flat``, this rank's gradients one after the other, and ``divisor``, the number that
    the sum over ranks must be divided by.
    """

    index: int
    dtype: np.dtype
    slots: tuple[Slot, ...]
    last: bool
    sparse: bool = False
    flat: Any = None
    divisor: Any = None

    @functools.cached_property
    def size(self) -> int:
        """The number of elements."""
        return sum(slot.length for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @functools.cached_property
    def chunks(self) -> list[tuple[int, list[Part]]]:
        """The bucket in consecutive chunks, by size and parts, each small enough to stay in a core's cache."""
        step, size = max(1, CHUNK // self.dtype.itemsize), self.size
        chunks: list[tuple[int, list[Part]]] = [(min(step, size - start), []) for start in range(0, size, step)]
        for place, slot in enumerate(self.slots):
            end = slot.offset + slot.length
            for number in range(slot.offset // step, -(-end // step)):
                first, last = max(slot.offset, number * step), min(end, (number + 1) * step)
                own = slice(first - slot.offset, last - slot.offset)
                if first < last:
                    chunks[number][1].append((place, own, slice(first - number * step, last - number * step)))
        return chunks

    def views(self, flat: Any = None) -> list[Any]:
        """Cut the leaves, in their shapes, out of a flat array of this layout (default: ``flat``)."""
        whole = self.flat if flat is None else flat
        return [whole[slot.offset : slot.offset + slot.length].reshape(slot.shape) for slot in self.slots]


def lay_out(
    leaves: Sequence[Leaf], plan: Sequence[Sequence[int]], sparse: frozenset[int] = frozenset()
) -> list[Bucket]:
    buckets = []
    for k, indices in enumerate(plan):
        slots, offset = [], 0
        for index in indices:
            leaf = leaves[index]
            length = math.prod(leaf.shape)
            slots.append(Slot(index, leaf.path, offset, length, leaf.shape))
            offset += length
        dtype, is_last = leaves[indices[0]].dtype, k == len(plan) - 1
        buckets.append(Bucket(k, dtype, tuple(slots), is_last, indices[0] in sparse))
    return buckets


def join_flat(arrays: Sequence[jax.Array]) -> jax.Array:
    flat = [array.reshape(-1) for array in arrays]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


divide_p = Primitive("divide_as_numpy")


def divided(x: Any, by: float) -> jax.Array:
    """Return ``x / by``, as NumPy divides."""
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return array / by
    found: jax.Array = divide_p.bind(array, by=by)
    return found


def _in_program(x: jax.Array, *, by: float) -> jax.Array:
    divisor = jnp.asarray(by, x.dtype)
    if jnp.iscomplexobj(x):  # NumPy multiplies too
        return x / divisor
    return x / jnp.where(jnp.isnan(x), 1, divisor)


divide_p.def_impl(jax.jit(_in_program, static_argnames="by"))
divide_p.def_abstract_eval(lambda x, by: x)
ad.deflinear2(divide_p, lambda g, _, by: [divide_p.bind(g, by=by)])
batching.defvectorized(divide_p)
mlir.register_lowering(divide_p, mlir.lower_fun(_in_program, multiple_results=False))
