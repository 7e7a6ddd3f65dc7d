"""A list scheduler for a V of stages: whenever a worker is free, it takes what is ready, and does not look ahead."""

import bisect
import heapq

from jdistgrad.schedules.costs import Costs
from jdistgrad.schedules.schedule import Action, Kind, Schedule

KINDS = (Kind.INPUT, Kind.FORWARD, Kind.WEIGHT)  # in the order of preference
INPUT, FORWARD, WEIGHT, NOTHING = range(4)


def greedy(workers: int, microbatches: int, costs: Costs) -> Schedule:
    """Return a schedule in which each of the workers keeps at most ``2 * workers`` recordings."""
    board = _Board(workers, microbatches, costs)
    while board.agenda:
        now, what, batch, stage = heapq.heappop(board.agenda)
        if what != NOTHING:
            bisect.insort(board.ready[board.place[stage]], (what, batch, board.last - stage))
        if not board.agenda or board.agenda[0][0] > now:
            for worker in range(workers):
                board.choose(now, worker)
    return Schedule(board.place, tuple(map(tuple, board.rows)))


class _Board:
    """What each worker has done and what is ready there: preference, microbatch, ``left``: stages after this one."""

    def __init__(self, workers: int, microbatches: int, costs: Costs):
        self.place = (*range(workers), *reversed(range(workers)))
        self.last = len(self.place) - 1
        self.rows: list[list[Action]] = [[] for _ in range(workers)]
        self.ready: list[list[tuple[int, int, int]]] = [[] for _ in range(workers)]
        self.agenda = [(0.0, FORWARD, 0, 0)]  # when something becomes ready or (NOTHING) a worker free
        self._free, self._alive = [0.0] * workers, [0] * len(self.place)
        self._microbatches, self._delay, self._seconds = microbatches, costs.message, costs.of_stages(len(self.place))

    def choose(self, now: float, worker: int) -> None:
        for what, batch, left in self.ready[worker] if self._free[worker] <= now else ():
            if what != FORWARD or self._has_room(self.last - left):
                self.ready[worker].remove((what, batch, left))
                self._begin(now, worker, what, batch, self.last - left)
                break

    def _has_room(self, stage: int) -> bool:
        """Return whether a forward pass may begin: one recording is reserved for the worker's late stage.

        Without this recording the late stage could never begin, and none of the early stage's would end.
        """
        early = self._alive[min(stage, self.last - stage)]
        late = self._alive[max(stage, self.last - stage)]
        return early + late <= self.last and (stage > self.last - stage or early < self.last)

    def _begin(self, now: float, worker: int, what: int, batch: int, stage: int) -> None:
        self.rows[worker].append(Action(KINDS[what], stage, batch))
        self._free[worker] = end = now + self._seconds[KINDS[what]][stage]
        self._alive[stage] += (what == FORWARD) - (what == WEIGHT)
        follow = [(end, NOTHING, batch, stage)]
        if what == INPUT:
            follow.append((end, WEIGHT, batch, stage))
        if what == FORWARD and stage == 0 and batch + 1 < self._microbatches:
            follow.append((end, FORWARD, batch + 1, 0))
        if what == FORWARD and stage == self.last:
            follow.append((end, INPUT, batch, stage))
        elif what != WEIGHT and (then := stage + (1 if what == FORWARD else -1)) >= 0:
            follow.append((end + self._delay * (self.place[then] != worker), what, batch, then))
        for arrival in follow:
            heapq.heappush(self.agenda, arrival)
