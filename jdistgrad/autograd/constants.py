"""What a step's operations are given that is known before it runs: numbers, and arrays of one number everywhere."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import jaxprs_in_params

from jdistgrad.autograd.equations import Atom, Constant, Equation
from jdistgrad.autograd.filled import Filled
from jdistgrad.autograd.layout import is_differentiable

SMALL = 1 << 16  # bytes: arrays up to here are kept


def constants_known(equations: Sequence[Equation]) -> list[Equation]:
    """The equations, with what is known as constants of the operations that need it: cotangents of sums and means are.

    Small arrays are kept; large ones are made where they are needed, if they can be.
    """
    numbers: dict[Atom, Constant] = {}
    filled: dict[Atom, Filled] = {}
    for equation in equations:
        inputs = [numbers.get(atom, atom) for atom in equation.inputs]
        if equation.operation is None and all(_is_number(atom) for atom in inputs):
            _evaluate(equation, [atom.value for atom in inputs if isinstance(atom, Constant)], numbers, filled)
    small = numbers | {atom: Constant(one.make(np)) for atom, one in filled.items() if one.size <= SMALL}
    return [_with_constants(one, small, filled) if one.operation is not None else one for one in equations]


def _with_constants(equation: Equation, small: dict[Atom, Constant], filled: dict[Atom, Filled]) -> Equation:
    inputs = [small.get(atom, atom) for atom in equation.inputs]
    fills = {atom: filled[atom] for atom in inputs if isinstance(atom, int) and atom in filled}
    return dataclasses.replace(equation, inputs=inputs, fills=fills)


def _is_number(atom: Atom) -> bool:
    return isinstance(atom, Constant) and not np.ndim(atom.value)


def _evaluate(equation: Equation, values: list[Any], numbers: dict[Atom, Constant], filled: dict[Atom, Filled]) -> None:
    """Add what an equation of numbers makes, if it is a number, or one number everywhere."""
    shapes = [variable.aval for variable in equation.eqn.outvars]
    if not all(is_differentiable(one) for one in shapes) or equation.eqn.effects:
        return
    if equation.eqn.primitive.name == "broadcast_in_dim" and len(values) == 1:
        filled[equation.outputs[0]] = Filled(np.asarray(values[0], shapes[0].dtype), shapes[0].shape)
    elif not any(one.shape for one in shapes) and not list(jaxprs_in_params(equation.eqn.params)):
        numbers |= zip(equation.outputs, map(Constant, equation.evaluate(values)), strict=True)
