"""Runs of a step: pieces and messages as a dataflow, each as soon as its inputs are known."""

import collections
import concurrent.futures
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad import events, jaxprs
from jdistgrad.autograd.callee.bundle import StopOutput
from jdistgrad.autograd.operations.messages import BundleCall
from jdistgrad.autograd.staged.equations import Constant
from jdistgrad.autograd.staged.plan import StepPlan, Unit
from jdistgrad.autograd.staged.rewriting import SMALL
from jdistgrad.autograd.tape.tape import at_place, next_place
from jdistgrad.autograd.values.primitive import Started, as_array
from jdistgrad.leaves import as_jax_array
from jdistgrad.rpc.current import current_scope, once_for_all, within
from jdistgrad.rpc.worker import current_worker, find_worker


class Prepared:
    """A plan, ready to run any number of times.

    Attributes:
      functions: the compiled function of each unit that is a piece; None for operations.
      variables: the variables that each unit needs.
      users: the units that need each variable.
      missing: the number of variables of other units that each unit waits for.
      uses: how often each variable is needed, by units and as an output.
      follows: by unit with a use of gradients, the variables it waits for only to keep the program's order.
    """

    def __init__(self, plan: StepPlan):
        self.plan = plan
        self._together: dict[tuple[int, ...], BundleCall] = {}
        self.functions = [None if unit.operation else compiled(unit) for unit in plan.units]
        self.variables = [list(dict.fromkeys(unit.variables())) for unit in plan.units]
        self.users: dict[int, list[int]] = {}
        for number, needed in enumerate(self.variables):
            for variable in needed:
                self.users.setdefault(variable, []).append(number)
        made = {output for unit in plan.units for output in unit.outputs}
        self.uses = collections.Counter({variable: len(numbers) for variable, numbers in self.users.items()})
        self.uses.update(atom for atom in plan.outputs if isinstance(atom, int))
        self.missing = [len(made.intersection(one)) for one in self.variables]
        self.follows = {
            number: frozenset(unit.after).difference(unit.inputs)
            for number, unit in enumerate(plan.units)
            if unit.operation is not None and unit.operation.waits_for_order and unit.after
        }

    def together(self, numbers: Iterable[int]) -> tuple[BundleCall, list[int]]:
        """Return one operation for units that go in one message, and the order of the units in it."""
        operations = [unit.operation for unit in self.plan.units]
        units = sorted(numbers, key=lambda k: (not operations[k].reads, operations[k].uses_gradients, k))
        found = self._together.get(tuple(units))
        if found is None:
            places = itertools.count()
            each = [self.plan.units[number] for number in units]
            members = [(one.operation, tuple(next(places) for _ in one.inputs)) for one in each]
            wanted = [
                StopOutput(turn, k)
                for turn, one in enumerate(each)
                for k in range(one.operation.first, len(one.outputs))
            ]
            found = self._together[tuple(units)] = BundleCall(each[0].operation.to, members, tuple(wanted))
        return found, units


# An operation whose message is not complete yet: its operands, its numbers, and its Started without a future.
Asked = tuple[list[Any], tuple[int, ...], Started]


class StepRun:
    """A run of a plan: the values known so far, the units that are ready, and the operations under way."""

    def __init__(self, prepared: Prepared, leaves: Sequence[Any]):
        self._prepared, self._plan = prepared, prepared.plan
        self._values: dict[int, Any] = dict(zip(prepared.plan.inputs, leaves, strict=True))
        self._missing, self._uses = list(prepared.missing), dict(prepared.uses)
        self._place = next_place()
        self._sends: collections.deque[int] = collections.deque()
        self._pieces: list[int] = []  # a heap: units are numbered by urgency
        self._under_way: dict[concurrent.futures.Future[Any], list[tuple[int, Started]]] = {}
        self._current: Any = None  # the operation that is started or finished
        for number, missing in enumerate(self._missing):
            if not missing:
                self._ready(number)

    def outputs(self) -> list[Any]:
        """Run all units and return the outputs. A failure ends the run without waiting for calls under way."""
        try:
            while self._sends or self._pieces or self._under_way:
                if self._sends:
                    self._send()
                elif self._pieces:
                    self._compute(heapq.heappop(self._pieces))
                else:
                    self._receive()
        except BaseException as error:
            for future in self._under_way:
                future.cancel()
            where = getattr(self._current, "where", None)
            if where and isinstance(error, Exception):
                error.add_note(f"called at {where}, in a step staged by jdistgrad.jit")
            raise
        found = [atom.value if isinstance(atom, Constant) else self._values[atom] for atom in self._plan.outputs]
        for k, one in enumerate(found):  # numbers, arguments and large answers: pieces have copied the small ones
            if not isinstance(one, jax.Array):
                found[k] = as_jax_array(one) if isinstance(one, np.ndarray) else jnp.asarray(one)
        return found

    def _compute(self, number: int) -> None:
        self._current, start, function = None, time.monotonic(), self._prepared.functions[number]
        assert function is not None, "an operation is sent, not computed"
        outputs = function(*self._take(number))
        if events.sink is not None:
            worker = find_worker()
            rank, name = (0, "") if worker is None else (worker.rank, worker.info.name)
            events.report(events.PIECE, rank, name, f"piece {number}", start, outputs)
        self._done(number, outputs)

    def _ready(self, number: int) -> None:
        if self._plan.units[number].operation is None:
            heapq.heappush(self._pieces, number)
        else:
            self._sends.append(number)

    def _take(self, number: int) -> list[Any]:
        """Return a unit's inputs, and drop values that nothing else needs."""
        unit = self._plan.units[number]
        taken = [atom.value if isinstance(atom, Constant) else self._values[atom] for atom in unit.inputs]
        for variable in self._prepared.variables[number]:
            self._uses[variable] -= 1
            if not self._uses[variable]:
                self._values.pop(variable, None)  # not there yet if a use of gradients goes in the message of a fetch
        return taken

    def _send(self) -> None:
        """Start the operations that are ready. Those that a worker can serve at once share a message."""
        groups: dict[int, dict[int, Asked]] = {}
        while self._sends or self._join(groups):
            number, self._current = self._sends.popleft(), None
            for variable in self._prepared.follows.get(number, ()):  # a use of gradients only follows these
                if isinstance(array := self._values.get(variable), jax.Array):
                    array.block_until_ready()  # the piece may be under way
            operation, operands = self._plan.units[number].operation, [as_array(one) for one in self._take(number)]
            self._current = operation
            with at_place((*self._place, number)):
                kept = operation.at_once(operands)
                if kept is None:
                    started = operation.start(operands)
                    self._done(number, started.known)
                    self._await(number, started)
                else:
                    numbers = operation.drawn(operands)
                    started = Started(None, operation.finish, operation.known(numbers), kept=kept)
                    groups.setdefault(operation.to, {})[number] = operands, numbers, started
                    self._done(number, started.known)
        for group in groups.values():
            self._send_together(group)

    def _send_together(self, group: Mapping[int, Asked]) -> None:
        bundle, units = self._prepared.together(group)
        self._current = bundle.operations[0]
        operands, numbers, asked = zip(*(group[number] for number in units), strict=True)
        only_fetches = all(one.reads for one in bundle.operations)
        with within(None if only_fetches else current_scope()):  # no owner must take part in a context by a fetch
            future = bundle.send(list(itertools.chain(*operands)), numbers, None)
        start = 0
        for number, started in zip(units, asked, strict=True):
            end = start + len(self._plan.units[number].outputs) - len(started.known)
            started.future, started.part = future, slice(start, end)
            self._await(number, started)
            start = end

    def _join(self, groups: Mapping[int, Mapping[int, Asked]]) -> bool:
        """Queue uses of gradients that only follow fetches in these groups: owners serve fetches first."""
        for number, ordered in self._prepared.follows.items():
            operation = self._plan.units[number].operation
            group = groups.get(operation.to, ()) if operation.uses_gradients else ()
            units = [self._plan.units[one] for one in group]
            fetched = {variable for one in units if one.operation.reads for variable in one.outputs}
            if 0 < self._missing[number] == len(ordered & fetched):
                self._missing[number] = -1
                self._ready(number)
        return bool(self._sends)

    def _await(self, number: int, started: Started) -> None:
        if started.future.done():
            self._finish(started.future, [(number, started)])
        else:
            self._under_way.setdefault(started.future, []).append((number, started))

    def _receive(self) -> None:
        self._current, futures = None, list(self._under_way)
        if len(futures) > 1:
            current_worker().transport.wait_for(futures, None)
            futures = [future for future in futures if future.done()]
        for future in futures:
            self._finish(future, self._under_way.pop(future))

    def _finish(self, future: concurrent.futures.Future[Any], asked: Sequence[tuple[int, Started]]) -> None:
        self._current = self._plan.units[asked[0][0]].operation
        answer = future.result()
        outputs = [one.finish(answer if one.part is None else list(answer[one.part])) for _, one in asked]
        for (number, started), mine in zip(asked, outputs, strict=True):
            self._done(number, mine, first=len(started.known))

    def _done(self, number: int, outputs: Sequence[Any], first: int = 0) -> None:
        """Store outputs of a unit, from number ``first`` on, and queue the units that miss nothing else."""
        variables = self._plan.units[number].outputs[first : first + len(outputs)]
        for variable, value in zip(variables, outputs, strict=True):
            if self._uses.get(variable):
                self._values[variable] = value
            for user in self._prepared.users.get(variable, ()):
                self._missing[user] -= 1
                if not self._missing[user]:
                    self._ready(user)


_shared = jaxprs.Shared(4096)


def compiled(unit: Unit) -> Callable[..., list[Any]]:
    """Return a piece as one jitted function of its inputs, which pieces with the same equations share."""

    def run(*inputs: Any) -> list[Any]:
        known = dict(zip(unit.inputs, inputs, strict=True))
        for equation in unit.equations:
            values = [atom.value if isinstance(atom, Constant) else known[atom] for atom in equation.inputs]
            known.update(zip(equation.outputs, equation.evaluate(values), strict=True))
        return [known[output] for output in unit.outputs]

    if jaxprs.calls_back(equation.eqn for equation in unit.equations):
        return jax.jit(run)  # not shared: for one worker, and as long as the step
    held = [atom.value for one in unit.equations for atom in one.inputs if isinstance(atom, Constant)]
    held += [value for one in unit.equations for value in jaxprs.arrays_in(one.eqn)]
    if sum(getattr(value, "nbytes", 0) for value in held) > SMALL:
        return once_for_all(jax.jit(run))  # sharing it would keep these arrays alive, which the step closes over
    shared: Callable[..., list[Any]] = _shared.get(key(unit), lambda: jax.jit(run))
    return once_for_all(shared)


def key(unit: Unit) -> Any:
    """Return a key of what a piece computes, independent of the names of its variables."""
    names = jaxprs.Names()

    def spell(atom: Any) -> Any:
        return jaxprs.constant_key(atom.value) if isinstance(atom, Constant) else names(atom)

    inputs = tuple(map(spell, unit.inputs))
    equations = tuple(
        (jaxprs.equation_key(one.eqn), tuple(map(spell, one.inputs)), tuple(map(spell, one.outputs)))
        for one in unit.equations
    )
    return inputs, equations, tuple(map(spell, unit.outputs))
