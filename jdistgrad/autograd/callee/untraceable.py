"""Errors of functions that JAX cannot trace: they want the value of an array, or have effects without a derivative."""

import traceback
from typing import Any

import jax

from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc.functions import describe

WANT_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
OTHERS = {"jax", "jdistgrad", "jaxlib", "numpy", "contextlib", "functools"}


class explained:  # noqa: N801 used like a function; a generator would add its frames to tracebacks
    """A block that turns JAX's errors about a function that cannot be traced into one sentence, with the line."""

    def __init__(self, function: Any):
        self._function = function

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, WANT_VALUES):
            why = "needs the value of an array"
        elif isinstance(error, ValueError) and "callbacks do not support" in str(error):
            why = "calls Python, without a derivative"
        else:
            return
        raise _untraceable(self._function, error, why).with_traceback(trace) from None


def _untraceable(function: Any, error: BaseException, why: str) -> DifferentiationError:
    return DifferentiationError(
        f"{describe(function)} cannot be traced: {_line(error)} {why}, but JAX traces a remote function that is "
        "differentiated or called in jit, without values. Compute with jax.numpy, put side effects into "
        "jax.debug.callback, give other callbacks a derivative (jax.custom_vjp), or call the function outside of grad "
        "and jit."
    )


def _line(error: BaseException) -> str:
    """Return the last line outside of JAX and this package that led to an error, and its place."""
    found = "a line"
    for frame, number in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).split(".")[0] not in OTHERS:
            summary = traceback.FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name)
            text = f"`{summary.line}` " if summary.line else ""
            found = f"{text}({summary.filename}:{number})"
    return found
