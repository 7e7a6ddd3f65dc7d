"""Hooks: pairs of pure functions, with a state of their own, that process a bucket instead of averaging it.

Uses collectives and buckets. Used by reducing and steps.
"""

from jdistgrad.data_parallel.hooks.averages import average as average, bfloat16 as bfloat16, float16 as float16
from jdistgrad.data_parallel.hooks.base import Hook as Hook, checked as checked
from jdistgrad.data_parallel.hooks.powersgd import powersgd as powersgd
from jdistgrad.data_parallel.hooks.quantized import int8 as int8

__all__ = ["Hook", "average", "bfloat16", "float16", "int8", "powersgd"]


def __dir__() -> list[str]:
    return __all__
