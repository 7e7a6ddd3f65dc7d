"""The schedules of the literature, as functions of the number of workers and microbatches.

GPipe (arXiv 1811.06965), 1F1B (2104.04473, with interleaving), zero bubble H1 (2401.10241) and V (2405.15362).
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from jdistgrad.errors import ScheduleError
from jdistgrad.pipeline.costs import Costs
from jdistgrad.pipeline.greedy import greedy
from jdistgrad.pipeline.playing import play
from jdistgrad.pipeline.schedule import Action, Kind, Schedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741
T = TypeVar("T")


def gpipe(workers: int, microbatches: int) -> Schedule:
    """Return the schedule of GPipe: all forward passes, then all backward passes. Keeps all recordings."""
    _check(workers=workers, microbatches=microbatches)
    order = [(kind, microbatch) for kind in (F, B) for microbatch in range(microbatches)]
    return _one_stage_each(workers, [order] * workers)


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
    backwards = list(_in_rounds(workers, microbatches, reversed(range(chunks))))
    rows = []
    for worker in range(workers):
        ahead = (workers - 1 - worker) * min(chunks, 2) + (chunks - 1) * workers
        pairs = _alternately(forwards, backwards, ahead)
        row = [Action(kind, chunk * workers + worker, batch) for kind, (chunk, batch) in pairs if batch < microbatches]
        rows.append(tuple(row))
    return Schedule(tuple(range(workers)) * chunks, tuple(rows))


def zero_bubble(workers: int, microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B with the backward pass in halves. The weights' gradients fill a part of the bubble.

    Every worker keeps as many recordings as there are workers.
    """
    _check(workers=workers, microbatches=microbatches)
    batches = range(microbatches)
    orders = []
    for worker in range(workers):
        order, late = [], iter(batches)
        for kind, batch in _alternately(batches, batches, workers - 1 - worker):
            order.append((I if kind is B else F, batch))
            if kind is B and batch >= worker:
                order.append((W, next(late)))
        orders.append(order + [(W, batch) for batch in late])
    return _one_stage_each(workers, orders)


def zbv(workers: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """Return the zero-bubble schedule of a V: worker ``w`` has the stages ``w`` and ``2 * workers - 1 - w``.

    Each worker keeps at most ``2 * workers`` recordings, of stages half as large as those of other schedules. Without
    ``costs``, the order is that of equal costs, which has no more bubble than a formula says from ``2 * workers - 2``
    microbatches on. With ``costs``, and for fewer microbatches, it is this order or a greedy one, whichever ends first.
    """
    _check(workers=workers, microbatches=microbatches)
    rows = (_v_order(workers, worker, max(microbatches, 2 * workers - 1)) for worker in range(workers))
    kept = (tuple(action for action in row if action.microbatch < microbatches) for row in rows)
    found = Schedule((*range(workers), *reversed(range(workers))), tuple(kept))
    if costs is None and microbatches >= 2 * workers - 1:
        return found
    costs = costs or Costs()
    chain = [(stage - 1,) if stage else () for stage in range(2 * workers)]
    both = (found, greedy(workers, microbatches, costs))
    return min(both, key=lambda one: max(row[-1][1] for row in play(one, chain, costs)[0]))


def _v_order(workers: int, worker: int, microbatches: int) -> Iterator[Action]:
    """Yield a worker's actions: forwards until the first comes back, then a first and a last stage in turn."""
    early, late, after = worker, 2 * workers - 1 - worker, workers - worker
    finish = ((F, late), (I, late), (W, late))
    order = [(F, early)] * (2 * after - 1) + [(F, late), (F, early)] * worker + [*finish] * after
    for batch in range(workers, microbatches):  # of the late stage
        more = after - 1 + batch < microbatches
        order += [(F, early)] * more + [(I, early), (W, early), *finish]
    order += [(I, early), (I, late)] * worker + [(I, early), (W, early)] * after
    order += [(W, late)] * worker + [(W, early)] * worker
    batches: dict[tuple[Kind, int], Iterator[int]] = defaultdict(itertools.count)
    for kind, stage in order:
        yield Action(kind, stage, next(batches[kind, stage]))


def forward_only(workers: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return a schedule without backward passes, for evaluation, with the placement of ``interleaved``."""
    _check(workers=workers, microbatches=microbatches, chunks=chunks)
    order = [pair for pair in _in_rounds(workers, microbatches, range(chunks)) if pair[1] < microbatches]
    rows = (tuple(Action(F, chunk * workers + w, batch) for chunk, batch in order) for w in range(workers))
    return Schedule(tuple(range(workers)) * chunks, tuple(rows))


def _in_rounds(workers: int, microbatches: int, chunks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield chunk and microbatch: as many microbatches as there are workers through each chunk, then the next ones.

    The last round is filled up. Callers leave the microbatches beyond the last one out: a schedule of more microbatches
    without some of them is a schedule too, whereas shorter rounds would let workers wait for each other.
    """
    every = list(chunks)
    for first in range(0, microbatches, workers):
        yield from ((chunk, first + k) for chunk in every for k in range(workers))


def _alternately(forwards: Sequence[T], backwards: Sequence[T], ahead: int) -> Iterator[tuple[Kind, T]]:
    """Yield some forward passes, then one forward and one backward in turn, then the backward passes that are left."""
    for step in range(len(forwards) + ahead):
        if step < len(forwards):
            yield F, forwards[step]
        if step >= ahead:
            yield B, backwards[step - ahead]


def _one_stage_each(workers: int, orders: Sequence[Iterable[tuple[Kind, int]]]) -> Schedule:
    rows = (tuple(Action(kind, worker, batch) for kind, batch in order) for worker, order in enumerate(orders))
    return Schedule(tuple(range(workers)), tuple(rows))


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ScheduleError(f"A schedule needs {name}= of at least 1, as an integer; got {count!r}.")
