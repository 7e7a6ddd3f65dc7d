"""Averages as hooks: the plain average, which is what no hook does, and averages in 16 bits, which halve the bytes."""

from typing import Any

import jax
import jax.numpy as jnp

from jdistgrad.data_parallel.buckets.bucket import Bucket
from jdistgrad.data_parallel.buckets.dividing import divided
from jdistgrad.data_parallel.collectives.base import Collectives
from jdistgrad.data_parallel.hooks.base import Hook


def average(predivide_factor: float | None = None) -> Hook:
    """Average: divide by ``bucket.divisor`` and sum.

    Arguments:
      predivide_factor: divide by this factor before the sum, and by the rest of the divisor after it. 1 sums first. A
        factor between 1 and the number of ranks keeps 16-bit gradients from underflow before the sum and from
        overflow in it.
    """
    if predivide_factor is None:
        return Hook(lambda bucket: (), _plain, "average")
    if isinstance(predivide_factor, bool) or not predivide_factor > 0:
        raise ValueError(f"hooks.average: predivide_factor must be above zero, not {predivide_factor!r}")

    def apply(bucket: Bucket, state: Any, collectives: Collectives) -> tuple[jax.Array, Any]:
        total = collectives.allreduce(divided(bucket.flat, predivide_factor))
        return divided(total, bucket.divisor / predivide_factor), state

    return Hook(lambda bucket: (), apply, f"average, divided by {predivide_factor:g} before the sum")


def _plain(bucket: Bucket, state: Any, collectives: Collectives) -> tuple[jax.Array, Any]:
    return collectives.allreduce(divided(bucket.flat, bucket.divisor)), state


def float16() -> Hook:
    """Average in float16: 11 bits of precision, up to 65504. Divides before the cast, so that sums do not overflow."""
    return _casting(jnp.float16)


def bfloat16() -> Hook:
    """Average in bfloat16: 8 bits of precision, the range of float32."""
    return _casting(jnp.bfloat16)


def _casting(dtype: Any) -> Hook:
    def apply(bucket: Bucket, state: Any, collectives: Collectives) -> tuple[jax.Array, Any]:
        if bucket.dtype.itemsize <= 2 or bucket.dtype.kind == "c":
            return _plain(bucket, state, collectives)
        small = (divided(bucket.flat, bucket.divisor)).astype(dtype)
        return collectives.allreduce(small).astype(bucket.dtype), state

    return Hook(lambda bucket: (), apply, jnp.dtype(dtype).name)
