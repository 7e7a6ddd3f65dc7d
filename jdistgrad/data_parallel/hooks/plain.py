"""The plain average as a hook: the same as no hook."""

from typing import Any

import jax

from jdistgrad.data_parallel.buckets.bucket import Bucket
from jdistgrad.data_parallel.collectives.base import Collectives
from jdistgrad.data_parallel.hooks.base import Hook


def average() -> Hook:
    """Average: divide by ``bucket.divisor`` and sum."""
    return Hook(lambda bucket: (), _apply, "average")


def _apply(bucket: Bucket, state: Any, collectives: Collectives) -> tuple[jax.Array, Any]:
    return collectives.allreduce(bucket.flat / bucket.divisor), state
