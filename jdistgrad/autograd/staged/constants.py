"""Constants that a step's operations need: numbers, and arrays that are one number everywhere."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from jdistgrad import jaxprs
from jdistgrad.autograd.staged.equations import Atom, Constant, Equation
from jdistgrad.autograd.values.holes import is_differentiable
from jdistgrad.autograd.values.uniform import Uniform

SMALL = 1 << 16  # bytes; arrays up to this size become constants


def constants_known(equations: Sequence[Equation]) -> list[Equation]:
    """Replace operation inputs that are known at trace time by constants; cotangents of sums and means usually are.

    Small arrays become constants. Large arrays are made where they are needed, if possible. An operation that needs a
    product with the number one gets the other factor instead, so that it does not wait for the product; the product is
    still computed if the step returns it.
    """
    numbers: dict[Atom, Constant] = {}
    filled: dict[Atom, Uniform] = {}
    same: dict[Atom, Atom] = {}
    weaker: dict[Atom, Atom] = {}
    kept = []
    for equation in equations:
        renamed = dataclasses.replace(equation, inputs=[same.get(atom, atom) for atom in equation.inputs])
        kept.append(renamed)
        inputs = [numbers.get(atom, atom) for atom in renamed.inputs]
        factor = _multiplied_by_one(renamed, inputs, filled)
        if factor is not None:
            same[equation.outputs[0]] = renamed.inputs[factor]
        elif equation.operation is None and all(_is_number(atom) for atom in inputs):
            _evaluate(equation, [atom.value for atom in inputs if isinstance(atom, Constant)], numbers, filled)
        elif _only_strengthens(equation):
            weaker[equation.outputs[0]] = weaker.get(renamed.inputs[0], renamed.inputs[0])
    small = numbers | {atom: Constant(one.make(np)) for atom, one in filled.items() if one.size <= SMALL}
    return [_with_constants(one, small, filled, weaker) if one.operation is not None else one for one in kept]


def _multiplied_by_one(equation: Equation, inputs: list[Atom], filled: dict[Atom, Uniform]) -> int | None:
    """Return which input an equation passes on unchanged, if it only multiplies by one; else None."""
    if equation.operation is not None or equation.eqn.primitive.name != "mul":
        return None
    (made,) = equation.eqn.outvars
    if not np.issubdtype(made.aval.dtype, np.floating) and made.aval.dtype != jax.numpy.bfloat16:
        return None
    for k in (0, 1):
        one = inputs[1 - k] if _is_number(inputs[1 - k]) else filled.get(inputs[1 - k])
        if isinstance(one, Constant | Uniform) and one.value == 1 and equation.eqn.invars[k].aval == made.aval:
            return k
    return None


def _only_strengthens(equation: Equation) -> bool:
    """Return whether an equation only removes the weak type of an array."""
    if equation.operation is not None or equation.eqn.primitive.name != "convert_element_type":
        return False
    (before,), (after,) = equation.eqn.invars, equation.eqn.outvars
    return bool(before.aval.shape) and before.aval.strip_weak_type() == after.aval.strip_weak_type()


def _with_constants(
    equation: Equation, small: dict[Atom, Constant], filled: dict[Atom, Uniform], weaker: dict[Atom, Atom]
) -> Equation:
    inputs = [small.get(atom, atom) for atom in equation.inputs]
    fills = {small.get(atom, atom): filled[atom] for atom in equation.inputs if atom in filled}
    mine = {atom: weaker[atom] for atom in inputs if atom in weaker}
    return dataclasses.replace(equation, inputs=inputs, fills=fills, weaker=mine)


def _is_number(atom: Atom) -> bool:
    return isinstance(atom, Constant) and not np.ndim(atom.value)


def _evaluate(
    equation: Equation, values: list[Any], numbers: dict[Atom, Constant], filled: dict[Atom, Uniform]
) -> None:
    """Evaluate an equation of numbers, if its outputs are numbers or one array that is one number everywhere.

    A callback is left to the step: it may read something anew in each run, as a learning rate.
    """
    shapes = [variable.aval for variable in equation.eqn.outvars]
    acts = equation.eqn.effects or jaxprs.calls_back([equation.eqn])
    if acts or not all(is_differentiable(one) for one in shapes):
        return
    if equation.eqn.primitive.name == "broadcast_in_dim" and len(values) == 1:
        filled[equation.outputs[0]] = Uniform(np.asarray(values[0], shapes[0].dtype), shapes[0].shape)
    elif not any(one.shape for one in shapes) and not list(jaxprs_in_params(equation.eqn.params)):
        numbers |= zip(equation.outputs, map(Constant, equation.evaluate(values)), strict=True)
