"""Operations that go to a worker in one message, as stops of one route."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jdistgrad.autograd.calls import Call
from jdistgrad.autograd.filled import Filled
from jdistgrad.autograd.operations import Packed, Started
from jdistgrad.autograd.order import next_place
from jdistgrad.autograd.pulls import Pull
from jdistgrad.autograd.results import as_jax
from jdistgrad.autograd.routes import Made, Route, Source, Visit
from jdistgrad.rpc.current import current_worker
from jdistgrad.rpc.frozen import Frozen


@dataclasses.dataclass(frozen=True)
class Member:
    """One operation of a convoy, and where its operands come from: numbers are those of the convoy's operands."""

    operation: Call | Pull
    sources: tuple[Source, ...]


@dataclasses.dataclass(eq=False)
class Convoy:
    """Operations on one worker, each of which needs the one before. Outputs: those of them that are wanted outside,
    the known ones first."""

    to: int
    members: tuple[Member, ...]
    wanted: tuple[Made, ...]
    _route: Frozen[Route] | None = None

    def __str__(self) -> str:
        return "\n     then    ".join(str(member.operation) for member in self.members)

    @property
    def where(self) -> str:
        return "; ".join(dict.fromkeys(member.operation.where for member in self.members))

    def start(self, operands: Sequence[Any]) -> Started:
        packed: list[Packed] = []
        for member in self.members:
            packed.append(member.operation.pack([_found(one, operands, packed) for one in member.sources]))
        wanted = [_found(one, operands, packed) for one in self.wanted]
        awaited = [one for one in wanted if isinstance(one, Made)]
        if self._route is None:
            self._route = Frozen(self._planned(packed, awaited))
        brought = [item for one in packed for item in one.items if not isinstance(item, Made | Filled)]
        functions = [getattr(member.operation, "function", None) for member in self.members]
        visit = Visit(self._route, functions, [one.numbers for one in packed], next_place(), brought)
        worker = current_worker()
        timeout = sum(member.operation.patience(worker.timeout) for member in self.members)
        future = worker.rpc_async(self.to, visit, (), {}, timeout)
        return Started(future, as_jax, wanted[: len(wanted) - len(awaited)])

    def _planned(self, packed: Sequence[Packed], awaited: list[Made]) -> Route:
        count, sources = 0, []
        for one in packed:
            sources.append(list[Source]())
            for item in one.items:
                sources[-1].append(item if isinstance(item, Made | Filled) else count)
                count += not isinstance(item, Made | Filled)
        return Route.of([member.operation.stop() for member in self.members], sources, awaited)


def _found(source: Source, operands: Sequence[Any], packed: Sequence[Packed]) -> Any:
    """An operand or output: itself, if it is known here; else what the callee finds it by."""
    if isinstance(source, int):
        return operands[source]
    if isinstance(source, Filled):
        return source
    known = packed[source.turn].known
    return known[source.number] if source.number < len(known) else Made(source.turn, source.number - len(known))
