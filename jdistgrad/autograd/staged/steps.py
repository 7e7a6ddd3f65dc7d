"""One traced step, ready to run: its pieces compiled, and who needs what."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdistgrad.autograd.contexts import some_context
from jdistgrad.autograd.gradients import hold
from jdistgrad.autograd.operations.calls import Call
from jdistgrad.autograd.operations.remote_calls import CallRemote
from jdistgrad.autograd.staged.batches import Convoy
from jdistgrad.autograd.staged.pieces import compiled
from jdistgrad.autograd.staged.plan import cut
from jdistgrad.autograd.staged.running import Run


class Step:
    """One traced step, ready to run."""

    def __init__(self, fun: Callable[..., Any], leaves: Sequence[Any], structure: Any):
        def flat(*leaves: Any) -> list[Any]:
            args, kwargs = jax.tree.unflatten(structure, leaves)
            results, self._result = jax.tree.flatten(fun(*args, **kwargs))
            return results

        self.plan = plan = cut(jax.make_jaxpr(flat)(*leaves))
        self.functions = [_unsent if node.operation else compiled(node) for node in plan.nodes]
        self.variables = [list(dict.fromkeys(a for a in node.inputs if isinstance(a, int))) for node in plan.nodes]
        self.users: dict[int, list[int]] = collections.defaultdict(list)
        for number, variables in enumerate(self.variables):
            for variable in variables:
                self.users[variable].append(number)
        made = {output for node in plan.nodes for output in node.outputs}
        self.missing = [len(made.intersection(variables)) for variables in self.variables]
        self.uses = {variable: len(users) for variable, users in self.users.items()}
        for atom in plan.outputs:
            if isinstance(atom, int):
                self.uses[atom] = self.uses.get(atom, 0) + 1
        self._records = any(_needs_context(operation) for operation in plan.operations)

    def run(self, leaves: Sequence[Any]) -> Any:
        with some_context(needed=self._records) as lease:
            outputs = Run(self, leaves).outputs()
            return hold(jax.tree.unflatten(self._result, outputs), lease)


def _needs_context(operation: Any) -> bool:
    if isinstance(operation, Convoy):
        return any(_needs_context(member.operation) for member in operation.members)
    return isinstance(operation, CallRemote) or (isinstance(operation, Call) and bool(operation.orders))


def _unsent(*inputs: Any) -> list[Any]:
    raise AssertionError("an operation is sent, not computed")
