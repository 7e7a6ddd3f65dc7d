"""The average, as a hook: what is done without one."""

from typing import Any

import jax

from jdistgrad.data_parallel.buckets.bucket import Bucket
from jdistgrad.data_parallel.collectives.base import Collectives
from jdistgrad.data_parallel.hooks.base import Hook


def average() -> Hook:
    """Divide and sum."""
    return Hook(lambda bucket: (), _apply, "average")


def _apply(bucket: Bucket, state: Any, collectives: Collectives) -> tuple[jax.Array, Any]:
    return collectives.allreduce(bucket.flat / bucket.divisor), state
