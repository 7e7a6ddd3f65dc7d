"""The comparison of two runs of a program, and the description of differences and failures."""

import re
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad import errors

MISMATCH, CRASH, HANG = "mismatch", "crash", "hang"
TIMED_OUT = ("CallTimeoutError", "MissingRanksError", "no sign of life")

JAX_SAYS = (
    "--------------------\nFor simplicity, JAX has removed its internal frames from the traceback of the following "
    "exception. Set JAX_TRACEBACK_FILTERING=off to include these.\n"
)

SHAKEN = 10.0  # the difference to allow, in multiples of the serial program's own movement
# By bytes: the error that sums and compiled code may have, relative to the largest number.
ROUNDING = {2: 4e-2, 4: 2e-4, 8: 1e-10}


class Problem(NamedTuple):
    """A mismatch, a crash or a hang, and its description."""

    kind: str
    text: str


def compare(
    found: Any, expected: Any, *, exactly: bool, least_bytes: int, moved: Callable[[], Any] | None = None
) -> list[Problem]:
    """Compare structures, shapes, dtypes, and values but for the rounding of numbers of ``least_bytes`` bytes.

    Arguments:
      moved: returns the serial program's results for arguments ``a_little_off``: numbers that nearly cancel differ too.
    """
    if jax.tree.structure(found) != jax.tree.structure(expected):
        return [Problem(MISMATCH, f"structure: {jax.tree.structure(found)}, not {jax.tree.structure(expected)}")]
    problems = []
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, one), other in pairs:
        text = difference(one, other, 0.0 if exactly else ROUNDING[least_bytes])
        if text:
            problems.append(Problem(MISMATCH, f"result{jax.tree_util.keystr(path)}: {text}"))
    if not problems or moved is None or exactly:
        return problems
    return _but_for(problems, found, expected, moved(), ROUNDING[least_bytes])


def _but_for(problems: list[Problem], found: Any, expected: Any, moved: Any, rounding: float) -> list[Problem]:
    """Return the problems, or none if the serial program's own movement explains all differences."""
    leaves = [jax.tree.leaves(tree) for tree in (found, expected, moved)]
    explained = all(
        not difference(one, other, rounding, SHAKEN * _distance(other, third))
        for one, other, third in zip(*leaves, strict=True)
    )
    return [] if explained else problems


def _distance(one: Any, other: Any) -> float:
    if jnp.result_type(one) == jax.dtypes.float0:
        return 0.0
    return float(np.max(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)), initial=0.0))


def a_little_off(tree: Any) -> Any:
    """Return a tree with its floats changed as much as a few operations might round them."""

    def move(leaf: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            return leaf
        return leaf * jnp.asarray(1 + ROUNDING[leaf.dtype.itemsize] / 50, leaf.dtype)

    return jax.tree.map(move, tree)


def difference(one: Any, other: Any, rounding: float, more: float = 0.0) -> str:
    """Return how two arrays differ, or an empty text if they do not. ``more``: a further difference to allow."""
    for what in (jnp.shape, jnp.result_type):
        if what(one) != what(other):
            return f"{what.__name__} {what(one)}, not {what(other)}"
    if jnp.result_type(other) == jax.dtypes.float0:
        return ""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if not np.isfinite(other).all():
        return "" if np.array_equal(one, other, equal_nan=True) else "other numbers that are not finite"
    largest = float(np.max(np.abs(other), initial=0.0))
    off = float(np.max(np.abs(one - other), initial=0.0))
    if off <= rounding * (largest + rounding) + more:
        return ""
    return f"off by {off:.3g}, where the largest number is {largest:.3g}: {one.ravel()[:4]}, not {other.ravel()[:4]}"


OURS = tuple(name for name, value in vars(errors).items() if isinstance(value, type))


def names_an_error(text: str) -> bool:
    """Return whether a text names one of the project's own errors; JAX puts these into errors of its own."""
    return any(name in text for name in OURS)


def failure(error: BaseException) -> Problem:
    """Return an exception as a crash, or as a hang if a wait has timed out; the text begins with the cause."""
    trace = "".join(traceback.format_exception(error, limit=-6)).replace(JAX_SAYS, "")
    causes = re.findall(r"^[\w.]*(?:Error|Exception|Exit)\b.*", trace, re.MULTILINE)
    text = "\n".join([*dict.fromkeys(causes), trace])
    return Problem(HANG if any(word in trace for word in TIMED_OUT) else CRASH, text)
