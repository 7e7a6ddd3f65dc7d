"""A list scheduler: each worker takes, whenever it is free, what is ready. Deterministic.

Where a formula says the order, the formula is better: this one does not look ahead.
"""

import heapq
from collections.abc import Sequence

from jdistgrad.pipeline.costs import Costs
from jdistgrad.pipeline.schedule import Action, Kind

FORWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.INPUT, Kind.WEIGHT
Arrival = tuple[int, Kind | None, int, int]  # at a worker: what it can begin, or None: it is free


def greedy(placement: Sequence[int], microbatches: int, costs: Costs, limit: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each worker for a chain of stages, of which a worker keeps at most ``limit`` recordings.

    A worker takes input gradients before forward passes, and weight gradients when nothing else can begin.
    """
    desks = [_Desk(limit, max(k for k, place in enumerate(placement) if place == w)) for w in range(max(placement) + 1)]
    desks[placement[0]].forwards = [(0, batch) for batch in range(microbatches)]
    seconds, last = costs.of_stages(len(placement)), len(placement) - 1
    agenda: dict[float, list[Arrival]] = {0.0: [(placement[0], None, 0, 0)]}
    times = [0.0]

    def note(when: float, arrival: Arrival) -> None:
        if when not in agenda:
            agenda[when] = []
            heapq.heappush(times, when)
        agenda[when].append(arrival)

    while times:
        now = heapq.heappop(times)
        arrivals = agenda.pop(now)
        for worker, kind, stage, batch in arrivals:
            desks[worker].receive(kind, stage, batch)
        for worker in {arrival[0] for arrival in arrivals}:
            desk = desks[worker]
            if desk.free > now or (action := desk.take()) is None:
                continue
            did, stage, batch = action
            desk.free = end = now + seconds[did][stage]
            note(end, (worker, None, 0, 0))
            turn = did is FORWARD and stage == last
            then = stage if turn else stage + 1 if did is FORWARD else stage - 1
            if did is not WEIGHT and then >= 0:
                place = placement[then]
                note(end if place == worker else end + costs.message, (place, INPUT if turn else did, then, batch))
    return tuple(tuple(desk.row) for desk in desks)


class _Desk:
    """What is ready on a worker, and what it has done."""

    def __init__(self, limit: int, last: int):
        self.row: list[Action] = []
        self.free = 0.0
        self.forwards: list[tuple[int, int]] = []  # heaps: later stages first, then by microbatch
        self.inputs: list[tuple[int, int]] = []
        self.weights: list[tuple[int, int]] = []
        self._alive, self._limit, self._last = 0, limit, last

    def receive(self, kind: Kind | None, stage: int, batch: int) -> None:
        if kind is not None:
            heapq.heappush(self.forwards if kind is FORWARD else self.inputs, (-stage, batch))

    def take(self) -> Action | None:
        if self.inputs:
            stage, batch = heapq.heappop(self.inputs)
            self.weights.append((-stage, batch))
            action = Action(INPUT, -stage, batch)
        elif self.forwards and self._has_room(-self.forwards[0][0]):
            stage, batch = heapq.heappop(self.forwards)
            self._alive += 1
            action = Action(FORWARD, -stage, batch)
        elif self.weights:
            self._alive -= 1
            action = Action(WEIGHT, *self.weights.pop(0))
        else:
            return None
        self.row.append(action)
        return action

    def _has_room(self, stage: int) -> bool:
        """Keep one place for the worker's last stage, without which no recording would ever end."""
        return self._alive + (stage != self._last) < self._limit
