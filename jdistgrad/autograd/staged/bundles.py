"""The caller's side of bundles: operations that go to a worker in one message, as the stops of a bundle."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jdistgrad.autograd.callee.bundle import Bundle, CallStop, PullStop, Source, StopOutput
from jdistgrad.autograd.callee.run_bundle import BundleRun
from jdistgrad.autograd.operations.calls import Call
from jdistgrad.autograd.operations.pulls import Pull
from jdistgrad.autograd.tape.links import Link, cause, next_message
from jdistgrad.autograd.tape.program_order import next_place
from jdistgrad.autograd.tape.tape import current_tape, next_number
from jdistgrad.autograd.values.holes import Hole, Operand
from jdistgrad.autograd.values.operation import Started
from jdistgrad.autograd.values.uniform import Uniform
from jdistgrad.rpc.by_value import Cached, from_cache
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.ids import as_token, from_token

Numbers = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CallerStop:
    """An operation of a bundle, with the sources of its operands. An int is the number of an operand of the bundle."""

    operation: Call | Pull
    sources: tuple[Source, ...]

    @property
    def records(self) -> bool:
        """Return whether the operation is recorded: its first output is then a tag, known before it is sent."""
        return isinstance(self.operation, Call) and bool(self.operation.orders)

    def stop(self) -> CallStop | PullStop:
        stop = self.operation.stop()
        if isinstance(stop, PullStop) and isinstance(self.sources[0], StopOutput):
            return dataclasses.replace(stop, call=self.sources[0].turn)
        return stop

    def numbers(self, operands: Sequence[Any], before: Sequence[Numbers]) -> Numbers:
        """Return the id of the message a call records, or the ids of the message and the contributions of a pull."""
        if isinstance(self.operation, Call):
            return (next_message(),) if self.records else ()
        tag = self.sources[0]
        assert not isinstance(tag, Uniform)
        return before[tag.turn][0] if isinstance(tag, StopOutput) else from_token(operands[tag])[1], next_number()


@dataclasses.dataclass(frozen=True)
class Outline:
    """The part that is the same in every run: the bundle, the items to bring, and the turns of the wanted tags."""

    bundle: Cached[Bundle]
    brought: list[Any]
    tags: list[int]

    @classmethod
    def of(cls, members: Sequence[CallerStop], wanted: Sequence[StopOutput]) -> "Outline":
        brought, sources = list[Any](), list[list[Source]]()
        for member in members:
            sources.append([])
            for item in member.operation.items():
                source = _source(item, member.sources)
                if not isinstance(source, StopOutput | Uniform):
                    source = _place_among(brought, source)
                sources[-1].append(_answered(source, members))
        tags = [one.turn for one in wanted if _is_tag(one, members)]
        answers = [_answered(one, members) for one in wanted if not _is_tag(one, members)]
        bundle = Bundle.of([member.stop() for member in members], sources, answers)
        return cls(from_cache(Cached(bundle).stream), brought, tags)  # one object for all equal bundles

    def items(self, operands: Sequence[Any]) -> list[Any]:
        return [one.of(operands) if isinstance(one, Operand) else one for one in self.brought]


@dataclasses.dataclass(eq=False)
class BundleCall:
    """A row of operations on one worker as one operation. Each member needs the member before.

    Its outputs are the members' outputs that are wanted outside the bundle, those known before the answer first.
    """

    to: int
    members: tuple[CallerStop, ...]
    wanted: tuple[StopOutput, ...]

    def __str__(self) -> str:
        return "\n     then    ".join(str(member.operation) for member in self.members)

    @property
    def where(self) -> str:
        return "; ".join(dict.fromkeys(member.operation.where for member in self.members))

    @property
    def states(self) -> list[Any]:
        """Return what identifies the states that its members change."""
        calls = [one.operation for one in self.members if isinstance(one.operation, Call)]
        return [one.state for one in calls if one.state is not None]

    @functools.cached_property
    def outline(self) -> Outline:
        return Outline.of(self.members, self.wanted)

    @functools.cached_property
    def functions(self) -> list[Any]:
        return [getattr(member.operation, "function", None) for member in self.members]

    def start(self, operands: Sequence[Any]) -> Started:
        worker, outline = current_worker(), self.outline
        numbers = list[Numbers]()
        for member in self.members:
            numbers.append(member.numbers(operands, numbers))
        if any(numbers):
            tape = current_tape(lambda: str(self.members[0].operation))
            tape.links.add_later(functools.partial(self._links, numbers, worker.rank, cause()))
        run = BundleRun(outline.bundle, self.functions, numbers, next_place(), outline.items(operands))
        future = worker.rpc_async(self.to, run, (), {}, self._patience(worker.timeout))
        return Started(future, list, [_tag(numbers[turn][0]) for turn in outline.tags])

    def _patience(self, default: float) -> float:
        return sum(member.operation.patience(default) for member in self.members)

    def _links(self, numbers: list[Numbers], caller: int, cause: int | None) -> list[Link]:
        each = zip(self.members, numbers, strict=True)
        return [link for member, mine in each for link in member.operation.links(mine, caller, cause)]


def _tag(message: int) -> Any:
    scope = current_scope()
    assert scope is not None
    return as_token(scope.id, message)


def _place_among(brought: list[Any], item: Any) -> int:
    """Return an item's place among those the message brings; an array that is used twice is brought once."""
    if isinstance(item, Operand) and isinstance(item.hole, Hole):
        for place, one in enumerate(brought):
            if isinstance(one, Operand) and isinstance(one.hole, Hole) and one.numbers == item.numbers:
                return place
    brought.append(item)
    return len(brought) - 1


def _source(item: Any, sources: Sequence[Source]) -> Any:
    """Express an item of an operation in terms of the operands of the whole bundle."""
    if not isinstance(item, Operand):
        return item
    found = [sources[k] for k in item.numbers]
    if isinstance(item.hole, Hole) and not isinstance(found[0], int):
        return found[0]
    return Operand(item.hole, tuple(one for one in found if isinstance(one, int)))


def _is_tag(one: StopOutput, members: Sequence[CallerStop]) -> bool:
    return one.number == 0 and members[one.turn].records


def _answered(source: Any, members: Sequence[CallerStop]) -> Any:
    """Renumber the source as the callee counts outputs: without the tag of a recorded call."""
    if not isinstance(source, StopOutput):
        return source
    return StopOutput(source.turn, source.number - members[source.turn].records)
