"""The local pieces of a step, compiled. Pieces of the same equations share one jitted function."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdistgrad import jaxprs
from jdistgrad.autograd.staged.equations import Constant
from jdistgrad.autograd.staged.plan import Node

SHARED = 4096  # pieces, of all steps, that others may share


@dataclasses.dataclass(frozen=True)
class Piece:
    """A node of a plan, equal to every other that computes the same."""

    key: Any
    node: Node = dataclasses.field(compare=False)


def compiled(node: Node) -> Callable[..., list[Any]]:
    """A piece as one jitted function of its inputs."""
    try:
        return _jitted(Piece(key(node), node))
    except TypeError:  # a parameter that cannot be hashed
        return _jitted.__wrapped__(Piece(None, node))


@functools.lru_cache(maxsize=SHARED)
def _jitted(piece: Piece) -> Callable[..., list[Any]]:
    node = piece.node

    def run(*inputs: Any) -> list[Any]:
        known = dict(zip(node.inputs, inputs, strict=True))
        for equation in node.equations:
            values = [atom.value if isinstance(atom, Constant) else known[atom] for atom in equation.inputs]
            known.update(zip(equation.outputs, equation.evaluate(values), strict=True))
        return [known[output] for output in node.outputs]

    return jax.jit(run)


def key(node: Node) -> Any:
    """What a piece computes, whatever its variables are called."""
    names: dict[Any, int] = {}

    def spell(atom: Any) -> Any:
        return _constant(atom.value) if isinstance(atom, Constant) else names.setdefault(atom, len(names))

    inputs = tuple(spell(atom) for atom in node.inputs)
    equations = tuple(
        (
            equation.eqn.primitive,
            tuple(sorted(equation.eqn.params.items())),
            jaxprs.surroundings(equation.eqn),
            tuple(map(spell, equation.inputs)),
            tuple(map(spell, equation.outputs)),
        )
        for equation in node.equations
    )
    return inputs, equations, tuple(map(spell, node.outputs))


def _constant(value: Any) -> Any:
    """Numbers by value; arrays are equal only to themselves."""
    if np.ndim(value) or isinstance(value, jax.Array):
        return "array", id(value)
    weak = bool(getattr(getattr(value, "aval", None), "weak_type", False))
    return "number", type(value), str(np.asarray(value).dtype), np.asarray(value).tobytes(), weak
