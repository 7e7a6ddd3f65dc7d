"""Rewrites of a step: the order of operations that change a state, and constants. Pure functions of equations.

JAX sees no dependence between a call that changes a module, or an optimizer's step, and what comes after it in the
program. Here these operations get one. Operations that need numbers known at trace time get these as constants.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from jdistgrad import jaxprs
from jdistgrad.autograd.staged.equations import Atom, Constant, Equation
from jdistgrad.autograd.values.holes import Uniform, is_differentiable
from jdistgrad.autograd.values.primitive import operations_in
from jdistgrad.rpc.handles import NO_MARKS

ADDITIONS = {"add", "add_any"}
SMALL = 1 << 16  # bytes; arrays up to this size become constants


def in_program_order(equations: Sequence[Equation]) -> list[Equation]:
    """Make equations wait for the answers that they would have waited for in the program run line by line.

    What may change a state waits for what may have changed the same state before; so does what has an effect that
    happens in order (a callback; a reduction, since ranks in different ones wait for each other). A use of gradients
    may change values that any call may read: it waits for all calls, fetches and effects with a result (such
    as averages over ranks) before it, but not for those that its gradients come from, which have been served when it
    runs; all later ones wait for it.
    """
    producers = {output: equation for equation in equations for output in equation.outputs}
    last: dict[Any, int] = {}
    read, used = list[Equation](), list[int]()
    found = []
    for equation in equations:
        states = equation.states()
        before = [last[state] for state in states if state in last]
        operation = equation.operation
        if operation is not None and operation.uses_gradients:
            served = _needed_by(equation, producers)
            before += [one.outputs[-1] for one in read if id(one) not in served]
            used.append(equation.outputs[-1])
        # Others may read values of other workers, or meet workers that read them.
        elif jaxprs.calls_back([equation.eqn]) if operation is None else operation.reads:
            before += used
            read += [equation] if equation.eqn.outvars else []
        found.append(dataclasses.replace(equation, after=tuple(dict.fromkeys(before))) if before else equation)
        last.update(dict.fromkeys(states, equation.outputs[-1]) if equation.outputs else {})
    return found


def _needed_by(equation: Equation, producers: Mapping[int, Equation]) -> set[int]:
    """Return the identities of all equations that an equation needs, directly or not."""
    found, pending = set[int](), [equation]
    while pending:
        for variable in pending.pop().variables():
            before = producers.get(variable)
            if before is not None and id(before) not in found:
                found.add(id(before))
                pending.append(before)
    return found


def marks_in_parts(equations: Sequence[Equation]) -> list[Equation]:
    """Let uses of gradients take the marks of contributions one by one, instead of sums that this worker computes.

    Then a use need not wait for this worker: it goes with the message that makes the last contribution.
    """
    sums = {
        equation.outputs[0]: equation.inputs
        for equation in equations
        if equation.operation is None and equation.eqn.primitive.name in ADDITIONS
    }

    def parts(atom: Atom) -> Iterator[Atom]:
        if atom in sums:
            for one in sums[atom]:
                yield from parts(one)
        else:
            yield atom

    found = []
    for equation in equations:
        if (use := equation.operation) is not None and use.uses_gradients:
            count = sum(use.used.parts)
            each = [list(parts(atom)) for atom in equation.inputs[:count]]
            inputs = [*(atom for mine in each for atom in mine), *equation.inputs[count:]]
            used = dataclasses.replace(use.used, parts=tuple(map(len, each)))
            equation = dataclasses.replace(equation, inputs=inputs, operation=dataclasses.replace(use, used=used))
        found.append(equation)
    return found


def refuse_inner_uses(equations: Iterable[Equation]) -> None:
    """Raise DifferentiationError for a use of gradients in the body of a loop or a branch.

    JAX may have traced the body for an earlier program.
    """
    for inner in operations_in([equation.eqn for equation in equations if equation.operation is None]):
        if inner.uses_gradients:
            raise inner.misplaced()


def require_all(uses: Iterable[Any], equations: Iterable[Equation]) -> None:
    """Raise DifferentiationError for a use of gradients that was traced, and that a transformation has dropped."""
    found = {id(equation.operation) for equation in equations}
    for one in uses:
        if id(one) not in found:
            raise one.misplaced()


def require_gradients(equations: Iterable[Equation]) -> None:
    """Raise DifferentiationError for a use of a gradient that is known to be zero."""
    for equation in equations:
        if equation.operation is not None and equation.operation.uses_gradients:
            known = [atom.value if isinstance(atom, Constant) else np.ones(NO_MARKS.shape) for atom in equation.inputs]
            equation.operation.marks(known)


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
    small = dict(numbers)
    for atom, one in filled.items():
        if one.value.nbytes * math.prod(one.shape) <= SMALL:
            small[atom] = Constant(np.full(one.shape, one.value))
    found = []
    for equation in kept:
        if equation.operation is not None:
            inputs = [small.get(atom, atom) for atom in equation.inputs]
            fills = {small.get(atom, atom): filled[atom] for atom in equation.inputs if atom in filled}
            mine = {atom: weaker[atom] for atom in inputs if atom in weaker}
            equation = dataclasses.replace(equation, inputs=inputs, fills=fills, weaker=mine)
        found.append(equation)
    return found


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


def _is_number(atom: Atom) -> bool:
    return isinstance(atom, Constant) and not np.ndim(atom.value)


def _evaluate(
    equation: Equation, values: list[Any], numbers: dict[Atom, Constant], filled: dict[Atom, Uniform]
) -> None:
    """Evaluate an equation of numbers, if its outputs are numbers or one array that is one number everywhere.

    A callback stays in the step: it may read another value in each run, such as a learning rate.
    """
    shapes = [variable.aval for variable in equation.eqn.outvars]
    acts = equation.eqn.effects or jaxprs.calls_back([equation.eqn])
    if acts or not all(is_differentiable(one) for one in shapes):
        return
    if equation.eqn.primitive.name == "broadcast_in_dim" and len(values) == 1:
        filled[equation.outputs[0]] = Uniform(np.asarray(values[0], shapes[0].dtype), shapes[0].shape)
    elif not any(one.shape for one in shapes) and not list(jaxprs_in_params(equation.eqn.params)):
        numbers |= zip(equation.outputs, map(Constant, equation.evaluate(values)), strict=True)
