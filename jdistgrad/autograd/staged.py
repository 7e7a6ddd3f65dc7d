"""The staged step: trace once, compile the local pieces, and run pieces and messages as a dataflow from Python."""

import collections
import concurrent.futures
import functools
import heapq
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad import events
from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd import order
from jdistgrad.autograd.calls import Call
from jdistgrad.autograd.contexts import some_context
from jdistgrad.autograd.convoys import Convoy
from jdistgrad.autograd.cutting import Plan, cut
from jdistgrad.autograd.equations import Constant
from jdistgrad.autograd.errands import Errand, send
from jdistgrad.autograd.gradients import hold
from jdistgrad.autograd.operations import Started
from jdistgrad.autograd.pieces import compiled
from jdistgrad.autograd.primitive import as_array
from jdistgrad.autograd.remotely import CallRemote
from jdistgrad.autograd.values import Fetch, Put
from jdistgrad.rpc.current import current_worker, find_worker
from jdistgrad.wire.arrays import ALIAS_FROM, as_jax


def jit(fun: Callable[..., Any]) -> "StagedFunction":
    """Like ``jax.jit``, for functions that call other workers: the fast way to run a step.

    The function is traced once for each structure and shape of its arguments and cut at the wire. Calls whose inputs
    are ready go out together, local pieces (each compiled by ``jax.jit``) run while messages are under way, and errors
    and Ctrl-C arrive as ordinary exceptions. Nothing waits for more than it needs: a reference is passed on before its
    value has been made, and a pullback asked for before its call has been answered, where the cotangent is known. Calls
    of jitted functions on one worker that follow each other with nothing between, and pullbacks of them, are asked for
    in one message, which has the time of all of them; what one hands to the next never travels. Like ``jax.jit`` it may
    drop calls whose results nobody uses.

    Inside ``scan``, ``while_loop`` and ``cond`` a remote call is a host callback, as in ``jax.jit``.

    Arguments:
      fun: a pure function of arrays, pytrees and RRefs; usually a ``jdistgrad.value_and_grad(...)``.

    Returns:
      The function; ``.plan(*args)`` shows its pieces.

    Example:
      >>> step = jd.jit(jd.value_and_grad(loss_fn, argnums=(0, 1)))
      >>> with jd.context() as ctx:
      ...     loss, (enc_grad, head_grad) = step(enc, head, x, y)
      ...     optimizer.step(ctx)
    """
    if not callable(fun):
        raise TypeError(f"jdistgrad.jit takes a function, not a {type(fun).__name__}: {fun!r:.60}")
    return StagedFunction(fun)


class StagedFunction:
    """What ``jit`` returns."""

    def __init__(self, fun: Callable[..., Any]):
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._steps: dict[Any, Step] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not trace_state_clean():
            return self._fun(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        return self._step(leaves, structure).run(leaves)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """How the step is cut for arguments like these; printed, it shows the pieces and messages."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        return self._step(leaves, structure).plan

    def _step(self, leaves: list[Any], structure: Any) -> "Step":
        worker = find_worker()
        key = (structure, None if worker is None else (worker.world, worker.rank), *map(_kind, leaves))
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = Step(self._fun, leaves, structure)
        return step


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)  # keys have none
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)
    raise TypeError(
        f"jdistgrad.jit: an argument (or a leaf of one) is a {type(leaf).__name__}: {leaf!r:.60}. Arguments must be "
        "arrays, numbers, RRefs and containers of them; close over anything else."
    )


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
    return isinstance(operation, CallRemote) or (isinstance(operation, Call) and operation.wanted is not None)


def _unsent(*inputs: Any) -> list[Any]:
    raise AssertionError("an operation is sent, not computed")


class Run:
    """One run of a step: what is known so far, what is ready, what is under way."""

    def __init__(self, step: Step, leaves: Sequence[Any]):
        self._step, self._plan = step, step.plan
        self._values: dict[int, Any] = dict(zip(step.plan.inputs, leaves, strict=True))
        self._missing, self._uses = list(step.missing), dict(step.uses)
        self._place = order.next_place()
        self._sends: collections.deque[int] = collections.deque()
        self._pieces: list[int] = []  # a heap: nodes are numbered by urgency
        self._under_way: dict[concurrent.futures.Future, list[tuple[int, Started]]] = {}
        for number, missing in enumerate(self._missing):
            if not missing:
                self._ready(number)

    def outputs(self) -> list[Any]:
        """Run everything. A failure ends the run; calls still under way are not waited for."""
        try:
            while self._sends or self._pieces or self._under_way:
                self._advance()
        except BaseException:
            for future in self._under_way:
                future.cancel()
            raise
        return _as_jax(
            [atom.value if isinstance(atom, Constant) else self._values[atom] for atom in self._plan.outputs]
        )

    def _advance(self) -> None:
        if self._sends:
            self._send()
        elif self._pieces:
            self._compute(heapq.heappop(self._pieces))
        else:
            self._receive()

    def _compute(self, number: int) -> None:
        start = time.monotonic()
        outputs = self._step.functions[number](*self._take(number))
        if events.sink is not None:
            tell_piece(number, start, outputs)
        self._done(number, outputs)

    def _ready(self, number: int) -> None:
        if self._plan.nodes[number].operation is None:
            heapq.heappush(self._pieces, number)
        else:
            self._sends.append(number)

    def _take(self, number: int) -> list[Any]:
        """A node's inputs. What nobody needs any more is forgotten."""
        node = self._plan.nodes[number]
        taken = [atom.value if isinstance(atom, Constant) else self._values[atom] for atom in node.inputs]
        for variable in self._step.variables[number]:
            self._uses[variable] -= 1
            if not self._uses[variable]:
                del self._values[variable]
        return taken

    def _send(self) -> None:
        """Start what is ready; errands for one worker together."""
        errands: dict[int, list[tuple[int, Errand]]] = {}
        while self._sends:
            number = self._sends.popleft()
            operation, operands = self._plan.nodes[number].operation, [as_array(one) for one in self._take(number)]
            with _explained(operation), order.at((*self._place, number)):
                errand = operation.errand(operands) if isinstance(operation, Fetch | Put) else None
                if errand is None:
                    self._started(number, operation.start(operands))
                else:
                    errands.setdefault(errand.to, []).append((number, errand))
        for group in errands.values():
            for (number, _), started in zip(group, send([errand for _, errand in group]), strict=True):
                self._started(number, started)

    def _started(self, number: int, started: Started) -> None:
        self._done(number, started.known)
        if started.future.done():
            self._finish(started.future, [(number, started)])
        else:
            self._under_way.setdefault(started.future, []).append((number, started))

    def _receive(self) -> None:
        futures = list(self._under_way)
        if len(futures) > 1:
            current_worker().transport.wait_for(futures, None)
            futures = [future for future in futures if future.done()]
        for future in futures:
            self._finish(future, self._under_way.pop(future))

    def _finish(self, future: concurrent.futures.Future, asked: Sequence[tuple[int, Started]]) -> None:
        with _explained(self._plan.nodes[asked[0][0]].operation):
            answer = future.result()
            outputs = [started.finish(answer) for _, started in asked]
        for (number, started), mine in zip(asked, outputs, strict=True):
            self._done(number, mine, first=len(started.known))

    def _done(self, number: int, outputs: Sequence[Any], first: int = 0) -> None:
        """So many outputs of a node are there; who needed nothing else is ready."""
        variables = self._plan.nodes[number].outputs[first : first + len(outputs)]
        for variable, value in zip(variables, outputs, strict=True):
            if variable in self._uses:
                self._values[variable] = value
            for user in self._step.users.get(variable, ()):
                self._missing[user] -= 1
                if not self._missing[user]:
                    self._ready(user)


_together = jax.jit(lambda arrays: arrays)


def _as_jax(arrays: list[Any]) -> list[Any]:
    """All of them as JAX arrays; small ones are made by compiled code: one by one takes three times as long."""
    arrays = [as_jax(one) if isinstance(one, np.ndarray) and one.nbytes >= ALIAS_FROM else one for one in arrays]
    others = {k: one for k, one in enumerate(arrays) if not isinstance(one, jax.Array)}
    if others:
        for k, one in zip(others, _together(list(others.values())), strict=True):
            arrays[k] = one
    return arrays


def tell_piece(number: int, start: float, outputs: Sequence[Any]) -> None:
    worker = find_worker()
    rank, name = (0, "") if worker is None else (worker.rank, worker.info.name)
    events.tell(events.PIECE, rank, name, f"piece {number}", start, outputs)


class _explained:  # noqa: N801 used like a function
    """A block in which the failure of an operation says where in the user's program it stands."""

    __slots__ = ("_operation",)

    def __init__(self, operation: Any):
        self._operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        where = getattr(self._operation, "where", None) if isinstance(error, Exception) else None
        if error is not None and where:
            error.add_note(f"called at {where}, in a step staged by jdistgrad.jit")
