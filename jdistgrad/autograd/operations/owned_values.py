"""Operations on values and gradients: fetch or publish a value, put a contribution to a gradient, take the sum.

The derivative of ``fetch`` and of ``take`` is a ``put``, that of ``publish`` and of ``put`` a ``take``. Contributions
go through the owner's ledger. Each operation returns or needs a handle. The cotangents of handles are the marks of
contributions. JAX adds them up: the sum tells the owner how many contributions to wait for, and which.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.autograd.tape.contributions import accept, arrays_of_value, take, value_layout
from jdistgrad.autograd.tape.ledger import Contribution, mark
from jdistgrad.autograd.tape.tape import current_tape, gradient_link, next_number, next_place, note_fetched
from jdistgrad.autograd.values.holes import Layout, Results, arrays_of, as_jax, reference_of
from jdistgrad.autograd.values.primitive import TOKEN_SHAPE, Batched, Operation, Shapes, Started, done
from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc.claims import Claim
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.handles import NO_MARKS
from jdistgrad.rpc.rref import by_reference
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.arrays import ArrayBlock
from jdistgrad.wire.message import as_token, from_token

Task = tuple[Any, tuple[Any, ...]]  # a function and its arguments
Addition = tuple[str, int, Contribution]  # the kind and the id of a target, and what is added to its gradient


@dataclasses.dataclass
class Request:
    """A request to a worker: for the arrays of a value it owns, to accept a contribution, or to run a task.

    ``known``: outputs that need no answer. ``finish`` turns the arrays into the other outputs. ``kept``: an object kept
    alive until then.
    """

    to: int
    value: int | None
    addition: Addition | None
    finish: Callable[[list[Any]], list[Any]]
    known: Sequence[Any] = ()
    kept: Any = None
    task: Task | None = None  # returns an array


def send(requests: Sequence[Request]) -> list[Started]:
    """Send requests to one worker, in one message. The one answer comes when all their tasks are done."""
    values = list(dict.fromkeys(one.value for one in requests if one.value is not None))
    additions = [one.addition for one in requests if one.addition is not None]
    tasks = [one.task for one in requests if one.task is not None]
    parts = ArrayBlock([leaf for _, _, part in additions for leaf in part.leaves if leaf is not None])
    # A fetch must not make the owner take part in the context.
    with within(current_scope() if additions or tasks else None):
        bare = [  # in place of each leaf, whether it is present
            (kind, identifier, part.number, part.lanes, [leaf is not None for leaf in part.leaves], part.place)
            for kind, identifier, part in additions
        ]
        args = (values, bare, parts, tasks)
        future = current_worker().rpc_async(requests[0].to, serve_requests, args, {}, None)
    task_places = itertools.count(len(values))
    started = []
    for one in requests:
        place = next(task_places) if one.task is not None else None if one.value is None else values.index(one.value)
        started.append(Started(future, functools.partial(_finished, one, place), one.known))
    return started


def _finished(request: Request, place: int | None, answer: tuple[list[int], list[Any]]) -> list[Any]:
    """Finish a request with its part of the answer, by its place among what was asked for; None: no arrays."""
    if place is None:
        return request.finish([])
    counts, arrays = answer
    start = sum(counts[:place])
    return request.finish(list(arrays[start : start + counts[place]]))


def serve_requests(
    values: list[int], additions: list[tuple[Any, ...]], parts: list[Any], tasks: list[Task]
) -> tuple[list[int], ArrayBlock]:
    """Read the values, accept the additions, run the tasks; return the numbers of arrays, and all arrays."""
    owned = current_worker().references.owned
    found = [arrays_of(owned.value(one).result()) for one in values]
    rest = iter(parts)
    for kind, identifier, number, lanes, there, place in additions:
        leaves = [next(rest) if one else None for one in there]
        accept(kind, identifier, Contribution(number, lanes, leaves, place))
    found += [[function(*args)] for function, args in tasks]
    return [len(arrays) for arrays in found], ArrayBlock([array for arrays in found for array in arrays])


@dataclasses.dataclass(eq=False)
class Fetch(Operation):
    """A fetch of a reference's value. Operands: what stands for the reference. Outputs: the arrays of the value."""

    reference: Any  # the reference's tree structure
    results: Results
    timeout: float | None
    recorded: bool = False
    title = "a fetch of a reference's value"

    def start(self, operands: Sequence[Any]) -> Started:
        rref = reference_of(self.reference, operands)
        if self.recorded:
            note_fetched(rref._claim.id, rref._claim.owner)

        def finish(value: Any) -> list[Any]:
            if isinstance(rref._claim, Claim):
                rref._claim.arrived = True
            return self.results.flatten(value)

        if self.results.have_keys and isinstance(rref._claim, Claim):
            owner = rref._claim.owner
            arrays = current_worker().rpc_async(owner, arrays_of_value, (rref.id,), {}, self.timeout)
            return Started(arrays, self.results.arrived)
        return Started(rref.value_future(self.timeout), finish)

    def request(self, operands: Sequence[Any]) -> Request | None:
        """Return the fetch as a Request, if the value is known to exist and to hold nothing but arrays; else None."""
        claim = reference_of(self.reference, operands)._claim
        at_hand = isinstance(claim, Claim) and claim.is_made and claim.owner != claim.mailbox.rank
        if not at_hand or self.timeout is not None or not self.results.are_arrays:
            return None
        if self.recorded:
            note_fetched(claim.id, claim.owner)
        return Request(claim.owner, claim.id, None, self.results.counted, kept=claim)

    def shapes(self, operands: Shapes) -> Shapes:
        if self.results.known is None:
            rref = reference_of(self.reference, [NO_MARKS, *operands[1:]])
            args = (by_reference(rref),)
            self.results.learn(current_worker().rpc_sync(rref.owner, value_layout, args, {}, self.timeout))
        return self.results.shapes


@dataclasses.dataclass(eq=False)
class Publish(Operation):
    """The publication of a value that stays here, under an id. Operands: the value's arrays. Output: its handle."""

    value: Layout
    id: int
    title = "jdistgrad.RRef"

    def start(self, operands: Sequence[Any]) -> Started:
        owned = current_worker().references.announce(self.id)
        owned.value.set_result(self.value.fill(operands))
        return done([NO_MARKS])

    def shapes(self, operands: Shapes) -> Shapes:
        raise DifferentiationError(
            "jdistgrad.RRef was called inside jax.jit (or scan, checkpoint ...), where the value has no data. Call it "
            "outside."
        )


@dataclasses.dataclass(eq=False)
class Put(Operation):
    """A contribution to the gradient of a target: a reference, a contribution, or a sum that was taken.

    Operands: the target's token, and the leaves that are not zero (``live`` of ``count``). Outputs: the handle, and the
    token of this contribution.
    """

    owner: int
    kind: str
    live: tuple[int, ...]
    count: int
    lanes: tuple[int, ...] = ()
    title = "a contribution to the gradient of a {0.kind} on rank {0.owner}"

    def start(self, operands: Sequence[Any]) -> Started:
        request = self.request(operands)
        if request is not None:
            return send([request])[0]
        identifier, contribution, outputs = self._made(operands)
        accept(self.kind, identifier, contribution)
        return done(outputs)

    def request(self, operands: Sequence[Any]) -> Request | None:
        """Return the contribution as a Request, if the gradient is another worker's; else None."""
        if self.owner == current_worker().rank:
            return None
        identifier, contribution, outputs = self._made(operands)
        current_tape(lambda: "a gradient").links.append(gradient_link(contribution.number, self.owner, identifier))
        return Request(self.owner, None, (self.kind, identifier, contribution), lambda _: [], outputs)

    def _made(self, operands: Sequence[Any]) -> tuple[int, Contribution, list[Any]]:
        (identifier,), number = from_token(operands[0]), next_number()
        leaves: list[Any] = [None] * self.count
        for k, leaf in zip(self.live, operands[1:], strict=True):
            leaves[k] = leaf
        marks = np.full((*self.lanes, *NO_MARKS.shape), mark(number), NO_MARKS.dtype)
        return identifier, Contribution(number, self.lanes, leaves, next_place()), [marks, as_token(number)]

    def shapes(self, operands: Shapes) -> Shapes:
        return [jax.ShapeDtypeStruct((*self.lanes, *NO_MARKS.shape), NO_MARKS.dtype), TOKEN_SHAPE]

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        return dataclasses.replace(self, lanes=(size, *self.lanes)), (1,), range(1, len(batched))


@dataclasses.dataclass(eq=False)
class Take(Operation):
    """The sum of the contributions to a target.

    Operands: the handle, whose marks identify the contributions, and the target's token. Outputs: the wanted leaves of
    the sum, and the token of the sum.
    """

    owner: int
    kind: str
    wanted: tuple[int, ...]
    count: int  # the number of leaves in all
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # shapes of the wanted leaves
    lanes: tuple[int, ...] = ()
    title = "for the sum of contributions on rank {0.owner}"

    def start(self, operands: Sequence[Any]) -> Started:
        (identifier,), taken = from_token(operands[1]), next_number()
        marks, *others = map(tuple, np.reshape(operands[0], (-1, *NO_MARKS.shape)).tolist())
        if any(one != marks for one in others):  # contributions count for all lanes: the owner would wait for ever
            raise DifferentiationError(
                f"no derivative is known {self} row by row, as jax.jacrev asks of a function that returns the "
                "gradient of a reference. Differentiate a copy of the value, rref.to_here()."
            )
        worker, args = current_worker(), (self.kind, identifier, marks, self.lanes, taken)
        future = take(*args) if self.owner == worker.rank else worker.rpc_async(self.owner, take, args, {}, None)

        def finish(leaves: list[Any]) -> list[Any]:
            found = leaves or [None] * self.count  # empty if there are no contributions
            wanted = [found[k] for k in self.wanted]
            for k, shape in enumerate(self.leaves):
                if wanted[k] is None:
                    wanted[k] = np.zeros(self.lanes + shape.shape, shape.dtype)
            return [*as_jax(wanted), as_token(taken)]

        return Started(future, finish)

    def shapes(self, operands: Shapes) -> Shapes:
        return [*(jax.ShapeDtypeStruct(self.lanes + one.shape, one.dtype) for one in self.leaves), TOKEN_SHAPE]

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        return dataclasses.replace(self, lanes=(size, *self.lanes)), (len(self.leaves),), ()
