"""Cutting a traced step at the wire: pure functions from a jaxpr to a plan of local pieces and operations.

Equations that depend on the answers of the same operations can run together, as soon as these are there. Of them, those
that some next message needs run first, in a piece of their own: it goes out before the rest is computed.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

from jdistgrad.autograd.operations import Call, Pull
from jdistgrad.autograd.primitive import untied_p, wire_p

INLINED = {"jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "remat2"} | {
    f"custom_{kind}_call{suffix}" for kind in ("jvp", "vjp") for suffix in ("", "_jaxpr")
}


@dataclasses.dataclass(frozen=True)
class Constant:
    """An input that is known when the step is traced."""

    value: Any


Atom = int | Constant


@dataclasses.dataclass(eq=False)
class Equation:
    """One equation of the step, over numbered variables. ``operation``: what it sends, if it does."""

    inputs: list[Atom]
    outputs: list[int]
    eqn: Any
    operation: Any = None

    def variables(self) -> Iterator[int]:
        return (atom for atom in self.inputs if isinstance(atom, int))


@dataclasses.dataclass(eq=False)
class Node:
    """A unit of the plan: an operation, or a piece of equations compiled together."""

    equations: list[Equation]
    inputs: list[Atom]
    outputs: list[int]
    urgency: float
    operation: Any = None


@dataclasses.dataclass
class Plan:
    """A step, cut: ``inputs`` and ``outputs`` of the whole, and the nodes in an order in which they could run."""

    inputs: list[int]
    outputs: list[Atom]
    nodes: list[Node]
    size: int

    @property
    def operations(self) -> list[Any]:
        return [node.operation for node in self.nodes if node.operation is not None]

    def __str__(self) -> str:
        return "\n".join(f"{number:>3}  {_spelled(node)}" for number, node in enumerate(self.nodes))


def cut(closed: Any) -> Plan:
    """The plan of a closed jaxpr."""
    equations, inputs, outputs, size = flatten(closed)
    equations = needed(equations, outputs)
    _mark_last_pulls(equations, outputs)
    return Plan(inputs, outputs, group(equations, outputs), size)


def has_wire(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr is sent."""
    return any(
        eqn.primitive is wire_p or any(has_wire(inner) for inner in jaxprs_in_params(eqn.params)) for eqn in jaxpr.eqns
    )


def flatten(closed: Any) -> tuple[list[Equation], list[int], list[Atom], int]:
    """A jaxpr's equations, with inner jaxprs that send something in the place of their calls."""
    equations: list[Equation] = []
    count = iter(range(1 << 40))

    def walk(jaxpr: Any, known: dict[Any, Atom]) -> list[Atom]:
        def read(atom: Any) -> Atom:
            return Constant(atom.val) if hasattr(atom, "val") else known[atom]

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            inner = _inlined(eqn)
            if inner is not None:
                body, constants = inner
                given = dict(zip(body.constvars, map(Constant, constants), strict=True))
                results = walk(body, given | dict(zip(body.invars, values, strict=True)))
            elif eqn.primitive is untied_p:
                results = values
            else:
                made = [next(count) for _ in eqn.outvars]
                results = list[Atom](made)
                operation = eqn.params["operation"] if eqn.primitive is wire_p else None
                equations.append(Equation(values, made, eqn, operation))
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    inputs = [next(count) for _ in closed.jaxpr.invars]
    known: dict[Any, Atom] = dict(zip(closed.jaxpr.constvars, map(Constant, closed.consts), strict=True))
    outputs = walk(closed.jaxpr, known | dict(zip(closed.jaxpr.invars, inputs, strict=True)))
    return equations, inputs, outputs, next(count)


def _inlined(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The body of a call that sends something, and its constants."""
    if eqn.primitive.name not in INLINED:
        return None
    body = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr") or eqn.params.get("fun_jaxpr")
    constants = getattr(body, "consts", ())
    body = getattr(body, "jaxpr", body)
    return (body, constants) if has_wire(body) else None


def needed(equations: Sequence[Equation], outputs: Iterable[Atom]) -> list[Equation]:
    """The equations that some output needs: unused calls are not made."""
    live = {atom for atom in outputs if isinstance(atom, int)}
    kept = []
    for equation in reversed(equations):
        if not live.isdisjoint(equation.outputs) or getattr(equation.eqn, "effects", None):
            live.update(equation.variables())
            kept.append(equation)
    return kept[::-1]


def _mark_last_pulls(equations: Sequence[Equation], outputs: Sequence[Atom]) -> None:
    """What is pulled once in the whole step need not be kept after that."""
    users = collections.Counter(variable for equation in equations for variable in equation.variables())
    users.update(atom for atom in outputs if isinstance(atom, int))
    made = {equation.outputs[0] for equation in equations if isinstance(equation.operation, Call)}
    for equation in equations:
        operation, tag = equation.operation, equation.inputs[0] if equation.inputs else None
        if isinstance(operation, Pull) and tag in made and users[tag] == 1:
            equation.operation = dataclasses.replace(operation, last=True)


def group(equations: Sequence[Equation], outputs: Sequence[Atom]) -> list[Node]:
    """Put equations that can run at the same time for the same reason together; in order."""
    after = _answers_needed(equations)
    urgency = _urgencies(equations, after)
    groups: dict[Any, list[Equation]] = {}
    for number, equation in enumerate(equations):
        key = (number,) if equation.operation is not None else (after[number], urgency[number])
        groups.setdefault(key, []).append(equation)
    place = {id(equation): number for number, equation in enumerate(equations)}
    used = {atom for atom in outputs if isinstance(atom, int)}
    users: dict[int, set[Any]] = collections.defaultdict(set)
    for key, members in groups.items():
        for equation in members:
            for variable in equation.variables():
                users[variable].add(key)
    nodes = [_node(key, members, users, used, urgency[place[id(members[0])]]) for key, members in groups.items()]
    return _in_order(nodes)


def _node(key: Any, members: list[Equation], users: Any, used: set[int], urgency: float) -> Node:
    made = [output for equation in members for output in equation.outputs]
    if members[0].operation is not None:
        return Node(members, members[0].inputs, made, urgency, members[0].operation)
    inputs = dict.fromkeys(v for equation in members for v in equation.variables())
    for output in made:
        inputs.pop(output, None)
    outputs = [output for output in made if output in used or users[output] - {key}]
    return Node(members, list(inputs), outputs, urgency)


def _answers_needed(equations: Sequence[Equation]) -> list[int]:
    """For each equation, the operations that must have answered before, as the bits of a number."""
    bits: dict[int, int] = {}
    needs = []
    for number, equation in enumerate(equations):
        mask = 0
        for variable in equation.variables():
            mask |= bits.get(variable, 0)
        needs.append(mask)
        if equation.operation is not None:
            mask |= 1 << number
        bits.update(dict.fromkeys(equation.outputs, mask))
    return needs


def _urgencies(equations: Sequence[Equation], after: Sequence[int]) -> list[float]:
    """For each equation, how early the first message is that needs it: the number of rounds of messages before."""
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


def _in_order(nodes: list[Node]) -> list[Node]:
    """Nodes after those they need; where there is a choice, the urgent ones first."""
    producer = {output: node for node in nodes for output in node.outputs}
    done: set[int] = set()
    ordered: list[Node] = []

    def visit(node: Node) -> None:
        stack = [(node, iter([atom for atom in node.inputs if isinstance(atom, int)]))]
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
                stack.append((before, iter([atom for atom in before.inputs if isinstance(atom, int)])))

    for node in sorted(nodes, key=lambda node: node.urgency):
        visit(node)
    return ordered


def _spelled(node: Node) -> str:
    needs = ", ".join(f"v{atom}" for atom in node.inputs if isinstance(atom, int)) or "nothing"
    gives = ", ".join(f"v{output}" for output in node.outputs) or "nothing"
    if node.operation is None:
        names = collections.Counter(equation.eqn.primitive.name for equation in node.equations)
        what = "compute " + ", ".join(f"{name} x{count}" if count > 1 else name for name, count in names.items())
    else:
        what = f"send    {node.operation}"
    return f"{what}\n       needs {needs}; gives {gives}"
