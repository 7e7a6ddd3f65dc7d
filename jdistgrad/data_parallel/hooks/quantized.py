"""8 bits for each number, with a scale for each block; the rounding error is added to the next step's gradient.

Error feedback: Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014). Guarantee: the sum of what was
sent never differs from the sum of the gradients by more than one step's rounding. Weakness: every rank gathers the
bytes of all ranks, so the hook saves nothing beyond about eight ranks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jdistgrad.data_parallel.buckets.bucket import Bucket
from jdistgrad.data_parallel.buckets.dividing import divided
from jdistgrad.data_parallel.collectives.base import Collectives
from jdistgrad.data_parallel.hooks.base import Hook, finite_or

BLOCK = 1024


def int8(*, block: int = BLOCK) -> Hook:
    """Average in 8 bits, with error feedback. The state is the rounding error: an array as large as the bucket."""
    if block < 1:
        raise ValueError(f"int8: a block has at least one element, not {block!r}")

    def init(bucket: Bucket) -> jax.Array:
        return jnp.zeros(bucket.size, bucket.dtype)

    def apply(bucket: Bucket, error: jax.Array, collectives: Collectives) -> tuple[jax.Array, jax.Array]:
        if bucket.dtype.kind == "c":
            return collectives.allreduce(divided(bucket.flat, bucket.divisor)), error
        small, scales, error = _quantize(divided(bucket.flat, bucket.divisor) + error, block)
        total = _total(collectives.gather_same(small), collectives.gather_same(scales), bucket.size)
        return total.astype(bucket.dtype), error

    return Hook(init, apply, f"int8(block={block})")


@functools.partial(jax.jit, static_argnums=1)
def _quantize(wanted: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    blocks = jnp.pad(wanted, (0, -wanted.size % block)).reshape(-1, block).astype(jnp.float32)
    scales = jnp.max(jnp.abs(blocks), axis=1, keepdims=True, initial=0) / 127
    small = jnp.round(blocks / jnp.where(scales == 0, 1, scales)).astype(jnp.int8)
    sent = (small.astype(scales.dtype) * scales).reshape(-1)[: wanted.size]
    return small, scales, finite_or(wanted - sent.astype(wanted.dtype))


@functools.partial(jax.jit, static_argnums=2)
def _total(small: Any, scales: Any, size: int) -> jax.Array:
    return jnp.sum(small.astype(jnp.float32) * scales, axis=0).reshape(-1)[:size]
