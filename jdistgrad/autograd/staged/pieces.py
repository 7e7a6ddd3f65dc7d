"""The compiled local pieces of a step. Pieces with the same equations share one jitted function."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdistgrad import jaxprs
from jdistgrad.autograd.staged.equations import Constant
from jdistgrad.autograd.staged.plan import Unit

SHARED = 4096  # the most pieces kept for sharing, over all steps


@dataclasses.dataclass(frozen=True)
class PieceKey:
    """The key of a piece, equal for all pieces that compute the same, and the piece's unit, which is compiled once."""

    key: Any
    unit: Unit = dataclasses.field(compare=False)


def compiled(unit: Unit) -> Callable[..., list[Any]]:
    """Return a piece as one jitted function of its inputs."""
    try:
        return _jitted(PieceKey(key(unit), unit))
    except TypeError:  # a parameter that cannot be hashed
        return _jitted.__wrapped__(PieceKey(None, unit))


@functools.lru_cache(maxsize=SHARED)
def _jitted(piece: PieceKey) -> Callable[..., list[Any]]:
    unit = piece.unit

    def run(*inputs: Any) -> list[Any]:
        known = dict(zip(unit.inputs, inputs, strict=True))
        for equation in unit.equations:
            values = [atom.value if isinstance(atom, Constant) else known[atom] for atom in equation.inputs]
            known.update(zip(equation.outputs, equation.evaluate(values), strict=True))
        return [known[output] for output in unit.outputs]

    return jax.jit(run)


def key(unit: Unit) -> Any:
    """Return a key of what a piece computes, independent of the names of its variables."""
    names: dict[Any, int] = {}

    def spell(atom: Any) -> Any:
        return _constant(atom.value) if isinstance(atom, Constant) else names.setdefault(atom, len(names))

    inputs = tuple(spell(atom) for atom in unit.inputs)
    equations = tuple(
        (
            equation.eqn.primitive,
            tuple(sorted(equation.eqn.params.items())),
            jaxprs.context_key(equation.eqn),
            tuple(map(spell, equation.inputs)),
            tuple(map(spell, equation.outputs)),
        )
        for equation in unit.equations
    )
    return inputs, equations, tuple(map(spell, unit.outputs))


def _constant(value: Any) -> Any:
    """Return a key of a constant: numbers are equal by value, arrays only to themselves."""
    if np.ndim(value) or isinstance(value, jax.Array):
        return "array", id(value)
    weak = bool(getattr(getattr(value, "aval", None), "weak_type", False))
    return "number", type(value), str(np.asarray(value).dtype), np.asarray(value).tobytes(), weak
