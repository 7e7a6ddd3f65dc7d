"""Hooks: pairs of pure functions, with a state of their own, that process a bucket instead of averaging it.

Uses collectives and buckets. Used by reducing and steps.
"""

from jdistgrad.data_parallel.hooks.base import (
    Hook as Hook,
    average as average,
    bfloat16 as bfloat16,
    float16 as float16,
)
from jdistgrad.data_parallel.hooks.compressing import int8 as int8, powersgd as powersgd

__all__ = ["Hook", "average", "bfloat16", "float16", "int8", "powersgd"]


def __dir__() -> list[str]:
    return __all__
