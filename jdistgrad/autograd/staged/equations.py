"""A traced step as equations over numbered variables, with every operation at the top level."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from jdistgrad import jaxprs
from jdistgrad.autograd.values.primitive import has_wire, untied_p, wire_p
from jdistgrad.leaves import as_jax_array

JITTED = {"jit", "pjit"}
INLINED = (
    JITTED
    | {"closed_call", "core_call", "remat", "checkpoint", "remat2"}
    | {f"custom_{kind}_call{suffix}" for kind in ("jvp", "vjp") for suffix in ("", "_jaxpr")}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An input that is known when the step is traced."""

    value: Any


Atom = int | Constant


@dataclasses.dataclass(eq=False)
class Equation:
    """An equation of the step, over numbered variables.

    ``outputs``: those of ``eqn``; one more, where it has none, if others must follow it: it is known once it runs.
    ``eqn``: JAX's equation, None for a bundle. ``operation``: the operation it performs. ``fills``: inputs that are one
    known number everywhere. ``weaker``: for an input that only lost its weak type, the variable it came from.
    ``after``: variables that it waits for without needing them.
    """

    inputs: list[Atom]
    outputs: list[int]
    eqn: Any
    operation: Any = None
    fills: dict[Atom, Any] = dataclasses.field(default_factory=dict)
    weaker: dict[Atom, Atom] = dataclasses.field(default_factory=dict)
    after: tuple[int, ...] = ()

    def variables(self) -> Iterator[int]:
        """Yield the variables that must be known before it can run."""
        return (atom for atom in (*self.inputs, *self.after) if isinstance(atom, int))

    def states(self) -> set[Any]:
        """Return what identifies the states that the equation may change, also in the body of a loop or a branch.

        An ordered effect counts as a state that the equation changes.
        """
        return _states(self.eqn) if self.eqn is not None else set(self.operation.states)

    def evaluate(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the outputs of an equation without an operation, as part of a trace if JAX is tracing."""
        found = jaxprs.bind(self.eqn, values)
        return [*found, *[np.True_] * (len(self.outputs) - len(found))]


def flatten(closed: Any) -> tuple[list[Equation], list[int], list[Atom], int]:
    """Return a jaxpr's equations, inputs, outputs and number of variables. Inner jaxprs with operations are inlined.

    NumPy arrays among its constants are copied: the program may change them before JAX compiles their users.
    """
    equations: list[Equation] = []
    count = iter(range(1 << 40))

    def walk(jaxpr: Any, known: dict[Any, Atom]) -> list[Atom]:
        def read(atom: Any) -> Atom:
            return Constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            inner = _inlined(eqn)
            if inner is not None:
                body, constants = inner
                given = dict(zip(body.constvars, map(_constant, constants), strict=True))
                results = walk(body, given | dict(zip(body.invars, values, strict=True)))
            elif eqn.primitive is untied_p:
                results = values
            else:
                made = [next(count) for _ in eqn.outvars]
                results = list[Atom](made)
                if not made and jaxprs.ordered_effects(eqn):
                    made = [next(count)]
                operation = eqn.params["operation"] if eqn.primitive is wire_p else None
                inputs = values if operation is None else list(operation.needed(values))
                equations.append(Equation(inputs, made, eqn, operation))
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    inputs = [next(count) for _ in closed.jaxpr.invars]
    known: dict[Any, Atom] = dict(zip(closed.jaxpr.constvars, map(_constant, closed.consts), strict=True))
    outputs = walk(closed.jaxpr, known | dict(zip(closed.jaxpr.invars, inputs, strict=True)))
    return equations, inputs, outputs, next(count)


def _constant(value: Any) -> Constant:
    return Constant(as_jax_array(value) if isinstance(value, np.ndarray) else value)


def _inlined(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the body and the constants of a call to inline; None for other equations.

    Inlined are bodies with operations, and those of jitted functions with NumPy arrays.
    """
    if eqn.primitive.name not in INLINED:
        return None
    body = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr") or eqn.params.get("fun_jaxpr")
    constants = getattr(body, "consts", ())
    body = getattr(body, "jaxpr", body)
    has_numpy = eqn.primitive.name in JITTED and any(isinstance(one, np.ndarray) for one in jaxprs.arrays_in(eqn))
    return (body, constants) if has_numpy or has_wire(body) else None


def _states(eqn: Any) -> set[Any]:
    inner = {state for jaxpr in jaxprs_in_params(eqn.params) for one in jaxpr.eqns for state in _states(one)}
    state = eqn.params["operation"].state if eqn.primitive is wire_p else None
    return inner | jaxprs.ordered_effects(eqn) | ({state} if state is not None else set())


def needed(equations: Sequence[Equation], outputs: Iterable[Atom]) -> list[Equation]:
    """Return the equations that some output needs, or that have effects or may change a state. Others do not run."""
    live = {atom for atom in outputs if isinstance(atom, int)}
    kept = []
    for equation in reversed(equations):
        if not live.isdisjoint(equation.outputs) or getattr(equation.eqn, "effects", None) or equation.states():
            live.update(equation.variables())
            kept.append(equation)
    return kept[::-1]


U = TypeVar("U", bound=Equation)


def in_order(units: Sequence[U]) -> list[U]:
    """Sort units so that each follows the units it needs; otherwise their order stays."""
    producer = {output: unit for unit in units for output in unit.outputs}
    done: set[int] = set()
    ordered: list[U] = []

    stack = [(unit, unit.variables()) for unit in reversed(units)]
    while stack:
        current, rest = stack[-1]
        if id(current) in done:
            stack.pop()
            continue
        before = next((producer[v] for v in rest if v in producer and id(producer[v]) not in done), None)
        if before is None:
            done.add(id(current))
            ordered.append(current)
            stack.pop()
        else:
            stack.append((before, before.variables()))
    return ordered


class Answers:
    """The operations that must have answered, as masks: bit k stands for the operation of equation k.

    ``before``: the mask before each equation can run. ``of``: the mask before each variable is known. Every output of
    an operation counts as part of its answer.
    """

    def __init__(self, equations: Sequence[Equation]):
        self.before: list[int] = []
        self.of: dict[int, int] = {}
        for number, equation in enumerate(equations):
            mask = self.for_all(equation.variables())
            self.before.append(mask)
            if equation.operation is not None:
                mask |= 1 << number
            self.of.update(dict.fromkeys(equation.outputs, mask))

    def for_all(self, variables: Iterable[int]) -> int:
        mask = 0
        for variable in variables:
            mask |= self.of.get(variable, 0)
        return mask
