"""Bundling: operations of a step on one worker that follow each other with nothing between share a message.

    y = rpc(1, f, x); z = rpc(1, g, y); loss = z.sum()

f and g (jitted functions) and both pullbacks need nothing from the caller once x is known. So one message requests them
together, and arrays that pass from one to the next never travel. A use of gradients, such as an optimizer's step, goes
with the last pullback that contributes to them. Pure functions from equations to equations.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

from jdistgrad.autograd.callee.bundle import Source, StopOutput
from jdistgrad.autograd.operations.messages import BundleCall, Member
from jdistgrad.autograd.staged.equations import Answers, Atom, Equation, in_order

LONG = {"dot_general", "conv_general_dilated", "sort", "fft", "cholesky", "eig", "eigh", "lu", "qr", "svd", "top_k"}


def with_bundles(equations: Sequence[Equation], outputs: Sequence[Atom]) -> list[Equation]:
    """Replace each row of operations that can share a message by one equation."""
    answers, taken = Answers(equations), set[int]()
    operations = {k: one.operation for k, one in enumerate(equations) if one.operation is not None}
    pulls = {k for k, one in operations.items() if one.pulls}
    uses = {k for k, one in operations.items() if one.uses_gradients}
    calls = {k for k, one in operations.items() if one.waits_for_nothing}
    tags = {equations[k].outputs[0] for k in calls}
    # Operations that wait for nothing when they are served: plain calls, and their pulls.
    travellers = calls | {k for k in pulls if equations[k].inputs[0] in tags}
    bundles = []
    for first in sorted(travellers | pulls):
        if first not in taken:
            followers = uses | travellers if first in travellers else uses
            members = _row(first, equations, answers, followers)
            if first in travellers or len(members) > 1:
                taken.update(members)
                bundles.append([equations[k] for k in members])
    alone = [equation for k, equation in enumerate(equations) if k not in taken]
    return in_order([*alone, *(_bundle(members, equations, outputs) for members in bundles)])


def _row(first: int, equations: Sequence[Equation], answers: Answers, followers: set[int]) -> list[int]:
    """Return the places of the row that starts with ``first``.

    Each member needs the member before, and nothing else that is still unknown when the message goes. Bundling must
    not delay anything: if another operation, or a computation that may take long, could start on the answer of an early
    member, the row ends with that member.
    """
    to, known = equations[first].operation.to, answers.before[first]
    row, made = [first], set(equations[first].outputs)
    local = {output for equation in equations if equation.operation is None for output in equation.outputs}
    for k in range(first + 1, len(equations)):
        equation = equations[k]
        if k not in followers or equation.operation.to != to or not answers.before[k] >> row[-1] & 1:
            continue
        tags = {equations[member].outputs[0] for member in row if equations[member].operation.records}
        if equation.operation.waits_for_nothing and not tags.isdisjoint(equation.inputs):
            continue  # a derivative as a function gets the tag of what it differentiates: the stop would not know it
        if not local.isdisjoint(equation.after):
            continue  # it follows an effect of the caller's, for which the row must not wait
        given = [atom for atom in equation.variables() if atom not in made and atom not in equation.fills]
        if not answers.for_all(given) & ~known:
            row.append(k)
            made.update(equation.outputs)
    while len(row) > 1 and (needed_early := _needed_early(row, equations, answers)) is not None:
        row = row[: needed_early + 1]
    return row


def _needed_early(row: list[int], equations: Sequence[Equation], answers: Answers) -> int | None:
    """Return the turn of the first member that something outside needs without needing the last member, or None."""
    outside = [
        answers.before[k]
        for k, equation in enumerate(equations)
        if k not in row
        and not answers.before[k] >> row[-1] & 1
        and (equation.operation is not None or _may_be_long(equation.eqn))
    ]
    return next((turn for turn, k in enumerate(row[:-1]) if any(mask >> k & 1 for mask in outside)), None)


def _may_be_long(eqn: Any) -> bool:
    """Return whether an equation may take more than one pass over its arrays."""
    inner = list(jaxprs_in_params(eqn.params))
    name = eqn.primitive.name
    if inner and not name.startswith(("scan", "while")):
        return any(_may_be_long(one) for jaxpr in inner for one in jaxpr.eqns)
    return bool(inner) or "callback" in name or name in LONG


def _bundle(members: list[Equation], equations: Sequence[Equation], outputs: Sequence[Atom]) -> Equation:
    """Make one equation of a row of operations."""
    sources, made = dict[Atom, Source](), dict[Atom, StopOutput]()
    inputs: list[Atom] = []
    parts = list[Member]()
    for turn, equation in enumerate(members):
        for atom in equation.inputs:
            if atom not in sources and atom in equation.fills:
                sources[atom] = equation.fills[atom]
            elif atom not in sources:
                sources[atom] = len(inputs)
                inputs.append(equation.weaker.get(atom, atom))  # the callee removes the weak type
        parts.append((equation.operation, tuple(sources[atom] for atom in equation.inputs)))
        made |= {output: StopOutput(turn, k) for k, output in enumerate(equation.outputs)}
        sources |= made
    used = {variable for one in equations if one not in members for variable in one.variables()}
    used.update(atom for atom in outputs if isinstance(atom, int))
    given = [output for equation in members for output in equation.outputs if output in used]
    given.sort(key=lambda one: made[one].number >= members[made[one].turn].operation.first)  # those known before first
    wanted = tuple(made[output] for output in given)
    after = tuple(variable for equation in members for variable in equation.after if variable not in made)
    return Equation(inputs, given, None, BundleCall(members[0].operation.to, parts, wanted), after=after)
