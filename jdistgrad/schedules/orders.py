"""The schedules of the literature: GPipe, 1F1B, interleaved, zero bubble H1 and V.

GPipe is of arXiv 1811.06965, 1F1B of 2104.04473 (section 2.2, with interleaving), H1 of 2401.10241 (section 2.1) and V
of 2405.15362 and 2401.10241 (section 6). Pipelines fill (forward passes only), are steady (forward and backward passes
in turn) and drain (backward passes only).
"""

import bisect
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from jdistgrad.errors import ScheduleError
from jdistgrad.schedules.playing import play
from jdistgrad.schedules.schedule import KINDS, Action, Costs, Kind, Schedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741
T = TypeVar("T")


def gpipe(workers: int, microbatches: int) -> Schedule:
    """Return the schedule of GPipe: all forward passes, then all backward passes. Keeps all recordings."""
    _check(workers=workers, microbatches=microbatches)
    orders = [[(kind, worker, k) for kind in (F, B) for k in range(microbatches)] for worker in range(workers)]
    return _schedule(range(workers), orders, microbatches)


def one_f_one_b(workers: int, microbatches: int) -> Schedule:
    """Return 1F1B: GPipe's bubble, but a worker keeps no more recordings than there are workers from it to the end."""
    return interleaved(workers, microbatches, 1)


def interleaved(workers: int, microbatches: int, chunks: int) -> Schedule:
    """Return 1F1B with several stages per worker: a bubble smaller by that factor, for as many times the messages.

    Arguments:
      workers: how many. Stage ``k`` is on worker ``k % workers``.
      microbatches: any number. The bubble is smallest for multiples of ``workers``.
      chunks: stages per worker.
    """
    _check(workers=workers, microbatches=microbatches, chunks=chunks)
    forwards = list(_in_rounds(workers, microbatches, range(chunks)))
    backwards = list(_in_rounds(workers, microbatches, range(chunks)[::-1]))
    orders = []
    for worker in range(workers):
        # To fill: a round through all chunks but the last. Then one forward pass for each worker after this one, while
        # the first microbatch goes to the last worker and its cotangents come back. With several chunks two, to hide
        # messages; in plain 1F1B that would keep more recordings.
        ahead = (workers - 1 - worker) * min(chunks, 2) + (chunks - 1) * workers
        turns = _alternately(forwards, backwards, ahead)
        orders.append([(kind, chunk * workers + worker, batch) for kind, (chunk, batch) in turns])
    return _schedule([*range(workers)] * chunks, orders, microbatches)


def zero_bubble(workers: int, microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B with backward passes in halves, where weight gradients fill a part of the bubble.

    Every worker keeps as many recordings as there are workers: worker ``w`` computes weight gradients ``w``
    microbatches after input gradients.
    """
    _check(workers=workers, microbatches=microbatches)
    batches, orders = range(microbatches + workers), []
    for worker in range(workers):
        order: list[tuple[Kind, int, int]] = []
        for kind, batch in _alternately(batches, batches, workers - 1 - worker):
            order.append((I if kind is B else F, worker, batch))
            if kind is B and batch >= worker:
                order.append((W, worker, batch - worker))
        orders.append(order)
    return _schedule(range(workers), orders, microbatches)


def zbv(workers: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """Return the zero-bubble schedule of a V: worker ``w`` has the stages ``w`` and ``2 * workers - 1 - w``.

    Each worker keeps at most ``2 * workers`` recordings, of stages half as large as those of other schedules. Without
    ``costs``, the order is optimal for equal costs: its bubble is (p - 1) / (6m + p - 1) for p workers and m
    microbatches, from m = 2p - 2 on. With ``costs``, or fewer microbatches, it is this order or a greedy one, whichever
    ends first.
    """
    _check(workers=workers, microbatches=microbatches)
    orders = [_v_order(workers, worker, max(microbatches, 2 * workers - 1)) for worker in range(workers)]
    found = _schedule((*range(workers), *reversed(range(workers))), orders, microbatches)
    if costs is None and microbatches >= 2 * workers - 1:
        return found
    costs = costs or Costs()
    chain = [(stage - 1,) if stage else () for stage in range(2 * workers)]
    both = (found, greedy(workers, microbatches, costs))
    return min(both, key=lambda one: max(row[-1][1] for row in play(one, chain, costs)[0]))


def _v_order(workers: int, worker: int, microbatches: int) -> Iterator[tuple[Kind, int, int]]:
    """Yield a worker's actions, of its early stage (on the way down the V) and its late one (on the way up).

    With equal costs a worker is never idle between its first action and its last.
    """
    early, late, after = worker, 2 * workers - 1 - worker, workers - worker
    finish = ((F, late), (I, late), (W, late))
    order = [(F, early)] * (2 * after - 1)  # fill, while microbatch 0 goes down the V and up again to the late stage
    order += [(F, late), (F, early)] * worker  # while it goes up to the last stage, and its cotangents come back down
    order += [*finish] * after  # while these go down the V, and up again to the early stage
    for batch in range(workers, microbatches):  # steady; ``batch`` is the late stage's
        order += [(F, early)] * (after - 1 + batch < microbatches) + [(I, early), (W, early), *finish]
    order += [(I, early), (I, late)] * worker  # drain: first what other workers wait for
    order += [(I, early), (W, early)] * after + [(W, late)] * worker + [(W, early)] * worker
    batches: dict[tuple[Kind, int], Iterator[int]] = defaultdict(itertools.count)
    for kind, stage in order:
        yield kind, stage, next(batches[kind, stage])


def forward_only(workers: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return a schedule without backward passes, for evaluation, with the placement of ``interleaved``."""
    _check(workers=workers, microbatches=microbatches, chunks=chunks)
    rounds = list(_in_rounds(workers, microbatches, range(chunks)))
    orders = [[(F, chunk * workers + worker, batch) for chunk, batch in rounds] for worker in range(workers)]
    return _schedule([*range(workers)] * chunks, orders, microbatches)


def _in_rounds(workers: int, microbatches: int, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield chunk and microbatch, in rounds of as many microbatches as workers through each chunk.

    The last round is padded: in a shorter one, workers would wait for each other.
    """
    for first in range(0, microbatches, workers):
        yield from ((chunk, first + k) for chunk in chunks for k in range(workers))


def _alternately(forwards: Sequence[T], backwards: Sequence[T], ahead: int) -> Iterator[tuple[Kind, T]]:
    """Yield ``ahead`` forward passes (fill), then forward and backward passes in turn (steady), then drain."""
    for step in range(len(forwards) + ahead):
        if step < len(forwards):
            yield F, forwards[step]
        if step >= ahead:
            yield B, backwards[step - ahead]


def _schedule(placement: Sequence[int], orders: Iterable[Iterable[tuple[Kind, int, int]]], batches: int) -> Schedule:
    """Return the schedule of the first microbatches: the others can be left out of any schedule."""
    rows = (tuple(Action(*one) for one in order if one[2] < batches) for order in orders)
    return Schedule(tuple(placement), tuple(rows))


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ScheduleError(f"A schedule needs {name}= of at least 1, as an integer; got {count!r}.")


PREFERENCE = I, F, W
INPUT, FORWARD, WEIGHT, NOTHING = range(4)  # kinds of entries on the agenda: places in PREFERENCE, or a free worker


def greedy(workers: int, microbatches: int, costs: Costs) -> Schedule:
    """Return the order of a list scheduler, without look-ahead, with at most ``2 * workers`` recordings per worker."""

    place = (*range(workers), *reversed(range(workers)))
    last, seconds = len(place) - 1, costs.of_stages(len(place))
    rows: list[list[Action]] = [[] for _ in range(workers)]
    ready: list[list[tuple[int, int, int]]] = [[] for _ in range(workers)]  # preference, microbatch, stages after it
    free, alive = [0.0] * workers, [0] * len(place)
    agenda = [(0.0, FORWARD, 0, 0)]  # when something becomes ready or (NOTHING) a worker free

    def has_room(what: int, stage: int) -> bool:
        # One recording is reserved for the late stage, without which the early stage's recordings would never end.
        early, late = sorted((stage, last - stage))
        room = alive[early] + alive[late] <= last and (stage == late or alive[early] < last)
        return what != FORWARD or room

    def begin(now: float, worker: int, what: int, batch: int, stage: int) -> None:
        kind = PREFERENCE[what]
        rows[worker].append(Action(kind, stage, batch))
        free[worker] = end = now + seconds[kind][stage]
        alive[stage] += KINDS[kind].keeps
        heapq.heappush(agenda, (end, NOTHING, batch, stage))
        for then, number, there in _ready_after(what, batch, stage, last):
            heapq.heappush(agenda, (end + costs.message * (place[there] != worker), then, number, there))

    while agenda:
        now, what, batch, stage = heapq.heappop(agenda)
        if what != NOTHING and batch < microbatches:
            bisect.insort(ready[place[stage]], (what, batch, last - stage))
        if not agenda or agenda[0][0] > now:
            for worker in [worker for worker in range(workers) if free[worker] <= now]:
                chosen = next((one for one in ready[worker] if has_room(one[0], last - one[2])), None)
                if chosen is not None:
                    ready[worker].remove(chosen)
                    begin(now, worker, *chosen[:2], last - chosen[2])
    return Schedule(place, tuple(map(tuple, rows)))


def _ready_after(what: int, batch: int, stage: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield the actions that become ready after one: kind, microbatch, stage."""
    if what == INPUT:
        yield WEIGHT, batch, stage
    if what == FORWARD and stage == 0:
        yield FORWARD, batch + 1, 0
    if what == FORWARD and stage == last:
        yield INPUT, batch, stage
    elif what != WEIGHT and (then := stage + (1 if what == FORWARD else -1)) >= 0:
        yield what, batch, then
