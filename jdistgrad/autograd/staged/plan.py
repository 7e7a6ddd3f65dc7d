"""Cutting a traced step at the wire: pure functions from a jaxpr to a plan of local pieces and operations.

Equations that depend on the answers of the same operations can run together, as soon as the answers are there. The
equations among them that a next message needs run first, in a piece of their own, so that the message goes out before
the rest is computed.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.autograd.staged.bundling import with_bundles
from jdistgrad.autograd.staged.equations import Answers, Atom, Equation, flatten, in_order, needed
from jdistgrad.autograd.staged.rewriting import (
    constants_known,
    in_program_order,
    marks_in_parts,
    require_all,
    require_gradients,
)
from jdistgrad.wire.arrays import ALIAS_FROM


@dataclasses.dataclass(eq=False)
class Unit(Equation):
    """A unit of the plan: an operation, or a piece of equations compiled together."""

    equations: list[Equation] = dataclasses.field(default_factory=list)
    urgency: float = math.inf


@dataclasses.dataclass
class StepPlan:
    """A step that is cut: its ``inputs`` and ``outputs``, and the units in an order in which they could run."""

    inputs: list[int]
    outputs: list[Atom]
    units: list[Unit]
    size: int

    @property
    def operations(self) -> list[Any]:
        return [unit.operation for unit in self.units if unit.operation is not None]

    def __str__(self) -> str:
        return "\n".join(f"{number:>3}  {_spelled(unit)}" for number, unit in enumerate(self.units))


def cut(closed: Any, uses: Sequence[Any] = ()) -> StepPlan:
    """Return the plan of a closed jaxpr in which there must be these uses of gradients."""
    equations, inputs, outputs, size = flatten(closed)
    require_all(uses, equations)
    equations = needed(marks_in_parts(equations), outputs)
    equations = constants_known(last_pulls_marked(equations, outputs))
    require_gradients(equations)
    equations = in_program_order(equations)
    copies, outputs = answers_copied(equations, outputs, size)
    equations = needed(with_bundles([*equations, *copies], outputs), outputs)
    return StepPlan(inputs, outputs, group(equations, outputs), size + len(copies))


def answers_copied(
    equations: Sequence[Equation], outputs: Sequence[Atom], size: int
) -> tuple[list[Equation], list[Atom]]:
    """Return equations that copy small outputs of operations into JAX arrays, and the step's outputs after copying.

    Compiled pieces copy such arrays together. Copied one by one, they take longer than the rest of a small piece. Large
    arrays are not copied.
    """
    shapes = {
        output: variable.aval
        for one in equations
        if one.operation is not None
        for output, variable in zip(one.outputs, one.eqn.outvars, strict=True)
    }
    copies: dict[Atom, Equation] = {}
    for atom in outputs:
        if atom not in shapes or atom in copies:
            continue
        shape = shapes[atom]
        if isinstance(shape.dtype, np.dtype) and shape.size * shape.dtype.itemsize < ALIAS_FROM:
            (copy,) = jax.make_jaxpr(jax.numpy.copy)(shape).eqns
            copies[atom] = Equation([atom], [size + len(copies)], copy)
    return list(copies.values()), [copies[atom].outputs[0] if atom in copies else atom for atom in outputs]


def last_pulls_marked(equations: Sequence[Equation], outputs: Sequence[Atom]) -> list[Equation]:
    """Mark each pull that alone uses its recording as the last, so that the callee drops the recording then."""
    users = collections.Counter(variable for equation in equations for variable in equation.variables())
    users.update(atom for atom in outputs if isinstance(atom, int))
    made = {one.outputs[0] for one in equations if one.operation is not None and one.operation.records}
    found = []
    for equation in equations:
        operation = equation.operation
        if operation is not None and operation.pulls and (tag := equation.inputs[0]) in made and users[tag] == 1:
            found.append(dataclasses.replace(equation, operation=dataclasses.replace(operation, last=True)))
        else:
            found.append(equation)
    return found


def group(equations: Sequence[Equation], outputs: Sequence[Atom]) -> list[Unit]:
    """Group equations that wait for the same answers and are equally urgent into units, in order."""
    after = Answers(equations).before
    urgency = _urgencies(equations)
    keys = [
        (after[number], urgency[number]) if equation.operation is None else number
        for number, equation in enumerate(equations)
    ]
    _join_users(equations, keys)
    groups: dict[Any, list[Equation]] = {}
    for key, equation in zip(keys, equations, strict=True):
        groups.setdefault(key, []).append(equation)
    place = {id(equation): number for number, equation in enumerate(equations)}
    used = {atom for atom in outputs if isinstance(atom, int)}
    users: dict[int, set[Any]] = collections.defaultdict(set)
    for key, members in groups.items():
        for equation in members:
            for variable in equation.variables():
                users[variable].add(key)
    units = [_unit(key, members, users, used, urgency[place[id(members[0])]]) for key, members in groups.items()]
    return in_order(sorted(units, key=lambda unit: unit.urgency))


def _join_users(equations: Sequence[Equation], keys: list[Any]) -> None:
    """Move arrays that are one number everywhere to the only piece that uses them. Keys of pieces are tuples."""
    users: dict[int, set[Any]] = collections.defaultdict(set)
    for number in reversed(range(len(equations))):
        equation = equations[number]
        if equation.operation is None and equation.eqn.primitive.name == "broadcast_in_dim":
            found = users[equation.outputs[0]]
            if not list(equation.variables()) and len(found) == 1 and isinstance(min(found), tuple):
                (keys[number],) = found
        for variable in equation.variables():
            users[variable].add(keys[number])


def _unit(key: Any, members: list[Equation], users: Any, used: set[int], urgency: float) -> Unit:
    first, made = members[0], [output for equation in members for output in equation.outputs]
    if first.operation is not None:
        return Unit(first.inputs, made, None, first.operation, after=first.after, equations=members, urgency=urgency)
    inputs = dict.fromkeys(v for equation in members for v in equation.variables())
    for output in made:
        inputs.pop(output, None)
    outputs = [output for output in made if output in used or users[output] - {key}]
    return Unit(list(inputs), outputs, None, equations=members, urgency=urgency)


def _urgencies(equations: Sequence[Equation]) -> list[float]:
    """Return for each equation the number of rounds of messages before the first message that needs it."""
    rounds = [0.0] * len(equations)
    level: dict[int, int] = {}
    for number, equation in enumerate(equations):
        before = max((level.get(variable, 0) for variable in equation.variables()), default=0)
        rounds[number] = before
        level.update(dict.fromkeys(equation.outputs, before + (equation.operation is not None)))
    wanted: dict[int, float] = {}
    urgency = [math.inf] * len(equations)
    for number in reversed(range(len(equations))):
        equation = equations[number]
        mine = min((wanted.get(output, math.inf) for output in equation.outputs), default=math.inf)
        urgency[number] = rounds[number] if equation.operation is not None else mine
        for variable in equation.variables():
            wanted[variable] = min(wanted.get(variable, math.inf), urgency[number])
    return urgency


def _spelled(unit: Unit) -> str:
    needs = ", ".join(f"v{variable}" for variable in unit.variables()) or "nothing"
    gives = ", ".join(f"v{output}" for output in unit.outputs) or "nothing"
    if unit.operation is None:
        names = collections.Counter(equation.eqn.primitive.name for equation in unit.equations)
        what = "compute " + ", ".join(f"{name} x{count}" if count > 1 else name for name, count in names.items())
    else:
        what = f"send    {unit.operation}"
    return f"{what}\n       needs {needs}; gives {gives}"
