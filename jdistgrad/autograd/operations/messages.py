"""Operations that are stops of a message, alone or together with others: the caller's side of a bundle."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jdistgrad.autograd.callee.bundle import Bundle, BundleRun, Source, Stop, StopOutput, send_alone
from jdistgrad.autograd.tape.tape import Link, cause, current_tape, next_place
from jdistgrad.autograd.values.holes import Hole, Operand, Uniform
from jdistgrad.autograd.values.primitive import Operation, Started
from jdistgrad.rpc.by_value import Cached, from_cache
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.arrays import ArrayBlock


class Crossing(Operation):
    """An operation that a worker performs as a stop of a message.

    Attributes:
      to: the worker's rank.
      function: the function that the stop calls, or None.
      first: how many outputs are known before the answer.
      where: the place of the operation in the user's program, for errors.
      timeout: that of the operation in seconds, None for the world's; the operation has ``times`` as much.
    """

    to: int
    function: Any
    where: str
    first: Any = 0
    timeout: float | None = None
    times: ClassVar[int] = 1

    def stop(self) -> tuple[Stop, list[Any]]:
        """Return the stop, as far as it is the same in every run of a step, and what it is called with.

        That is an Operand for what is made of operands; other things are as they are.
        """
        raise NotImplementedError

    def drawn(self, operands: Sequence[Any], message: int | None = None) -> tuple[int, ...]:
        """Return the numbers of the stop in this run.

        ``message``: that of the recording that the operation uses, if the same bundle makes it.
        """
        return ()

    def known(self, numbers: tuple[int, ...]) -> list[Any]:
        """Return the outputs that are known before the answer."""
        return []

    def link(self, numbers: tuple[int, ...], by: int | None) -> Link | None:
        """Return the link of a recorded call or its pull. ``by``: the message that is served meanwhile."""
        if not (self.records or self.pulls):
            return None
        what = describe(getattr(self, "call", self).function)
        return Link(numbers[0], current_worker().rank, self.to, what, self.pulls, by)

    def patience(self, default: float) -> float:
        return self.times * (default if self.timeout is None else self.timeout)

    def finish(self, arrays: list[Any]) -> list[Any]:
        """Return the other outputs, given the arrays that the stop returns in a bundle."""
        return arrays

    def start(self, operands: Sequence[Any]) -> Started:
        stop, items = self.stop()
        brought = [one.of(operands) if isinstance(one, Operand) else one for one in items]
        return self.alone(stop, self.function, self.drawn(operands), brought, self.finish)

    def alone(
        self, stop: Stop, function: Any, numbers: tuple[int, ...], items: list[Any], finish: Callable[[Any], list[Any]]
    ) -> Started:
        """Send a message with one stop. What the stop returns is finished by ``finish``."""
        if numbers and (link := self.link(numbers, cause())):
            current_tape(lambda: str(self)).links.append(link)
        future = send_alone(self.to, stop, function, numbers, items, self.patience(current_worker().timeout))
        return Started(future, finish, self.known(numbers))


Member = tuple[Crossing, tuple[Source, ...]]  # with the sources of its operands; an int: an operand of the bundle


@dataclasses.dataclass(eq=False)
class BundleCall(Operation):
    """Operations on one worker as one operation.

    Its outputs are the members' outputs that are wanted outside the bundle, those known before the answer first.
    ``where``: the places of the operations in the user's program. ``states``: what identifies the states they change.
    """

    to: int
    members: Sequence[Member]
    wanted: tuple[StopOutput, ...]
    waits_for_order = True

    def __post_init__(self) -> None:
        self.operations = [operation for operation, _ in self.members]
        self.where = "; ".join(dict.fromkeys(one.where for one in self.operations))
        self.states = [one.state for one in self.operations if one.state is not None]
        self.needs_context = any(one.needs_context for one in self.operations)

    def __str__(self) -> str:
        return "\n     then    ".join(map(str, self.operations))

    @functools.cached_property
    def outline(self) -> tuple[Cached[Bundle], list[Any], list[StopOutput]]:
        """Return what is the same in every run: the bundle, the items to bring, and the wanted outputs known before."""
        brought, sources, stops = list[Any](), list[list[Source]](), list[Stop]()

        def answered(one: StopOutput) -> StopOutput:
            """Renumber an output as the callee counts them: without those known before."""
            return StopOutput(one.turn, one.number - self.operations[one.turn].first)

        for operation, mine in self.members:
            stop, items = operation.stop()
            if stop.follows and isinstance(tag := mine[0], StopOutput):
                stop.call = tag.turn
            stops.append(stop)
            sources.append([])
            for item in items:
                source = _source(item, mine)
                if isinstance(source, StopOutput):
                    source = answered(source)
                elif not isinstance(source, Uniform):
                    source = _place_among(brought, source)
                sources[-1].append(source)
        known = [one for one in self.wanted if one.number < self.operations[one.turn].first]
        bundle = Bundle(stops, sources, [answered(one) for one in self.wanted if one not in known])
        return from_cache(Cached(bundle).stream), brought, known  # one for all equal bundles

    def start(self, operands: Sequence[Any]) -> Started:
        numbers = list[tuple[int, ...]]()
        for operation, sources in self.members:
            message, first = None, sources[0] if sources else None
            if operation.follows_tag and isinstance(first, StopOutput):
                message = numbers[first.turn][0]
            given = [operands[one] if isinstance(one, int) else None for one in sources]
            numbers.append(operation.drawn(given, message))
        if any(numbers):
            each, by = list(zip(self.operations, numbers, strict=True)), cause()
            links = current_tape(lambda: str(self.operations[0])).links
            links.append(lambda: [link for one, mine in each if mine and (link := one.link(mine, by))])
        patience = sum(one.patience(current_worker().timeout) for one in self.operations)
        future, (_, _, known) = self.send(operands, numbers, patience), self.outline
        outputs = {turn: self.operations[turn].known(numbers[turn]) for turn in {one.turn for one in known}}
        return Started(future, list, [outputs[one.turn][one.number] for one in known])

    def send(
        self, operands: Sequence[Any], numbers: Sequence[tuple[int, ...]], timeout: float | None
    ) -> concurrent.futures.Future[Any]:
        """Send the message; return a future of the wanted arrays that are not known before."""
        bundle, to_bring, _ = self.outline
        items = [one.of(operands) if isinstance(one, Operand) else one for one in to_bring]
        run = BundleRun(bundle, [one.function for one in self.operations], numbers, next_place())
        brought = ArrayBlock(items) if bundle.value.is_closed else items
        return current_worker().rpc_async(self.to, run, (brought,), {}, timeout)


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
