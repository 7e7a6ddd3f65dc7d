"""The warnings of a worker that waits for the end of its world, and their times."""

import pytest

from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.members.termination import Patience, Report, Serving, describe

WORKERS = [WorkerInfo(rank, f"worker{rank}") for rank in range(3)]
IDLE, OUTSIDE = Report(True, False, 3, 3), Report(False, False, 3, 3)
SLEEP, WAIT = Serving("time.sleep", 0, 73.4), Serving("threading.Event.wait", 2, 5.0)


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ({0: IDLE, 1: IDLE, 2: IDLE}, "for messages on their way"),
        ({0: IDLE, 1: OUTSIDE, 2: IDLE}, "for worker1 (rank 1), which has not called shutdown"),
        (
            {0: IDLE, 1: Report(True, True, 3, 3, (SLEEP,)), 2: OUTSIDE},
            "for worker1 (rank 1), which serves time.sleep, called by worker0 (rank 0) 73 s ago; "
            "for worker2 (rank 2), which has not called shutdown",
        ),
        (
            {0: IDLE, 1: Report(False, True, 3, 3, (SLEEP, WAIT)), 2: IDLE},
            "for worker1 (rank 1), which has not called shutdown and serves time.sleep, called by worker0 (rank 0) "
            "73 s ago, and threading.Event.wait, called by worker2 (rank 2) 5 s ago",
        ),
        (
            {0: IDLE, 1: IDLE, 2: Report(True, True, 3, 3, (SLEEP,) * 5)},
            "for worker2 (rank 2), which serves "
            f"{', and '.join(['time.sleep, called by worker0 (rank 0) 73 s ago'] * 3)}, and 2 more calls",
        ),
        ({0: IDLE, 1: Report(True, True, 3, 3), 2: IDLE}, "for worker1 (rank 1), which has calls in flight"),
        (
            {0: Report(True, True, 3, 3), 1: Report(True, True, 3, 3, (SLEEP,)), 2: IDLE},
            "for worker1 (rank 1), which serves time.sleep, called by worker0 (rank 0) 73 s ago",
        ),
        ({0: IDLE, 2: IDLE}, "for worker1 (rank 1), which does not answer"),
    ],
)
def test_whom_and_what_it_waits_for(reports, said):
    assert describe(WORKERS, reports) == said


def times(patience, looks):
    return [now for now, reports in looks if patience.wants_to_look(now) and patience.ends(reports, now)]


def test_it_speaks_when_all_want_to_close_whatever_moves():
    busy = [(float(now), {0: IDLE, 1: Report(True, True, now, 3)}) for now in range(100)]
    assert times(Patience(10, 0.0), busy) == [10, 20, 40, 80]


def test_it_keeps_silent_while_others_work():
    working = [(float(now), {0: IDLE, 1: Report(False, True, now, 3)}) for now in range(100)]
    assert times(Patience(10, 0.0), working) == []


def test_it_speaks_when_nothing_moves():
    still = [(float(now), {0: IDLE, 1: OUTSIDE}) for now in range(100)]
    assert times(Patience(10, 0.0), still) == [20, 30, 50, 90]


def test_programs_that_are_still_now_and_then_are_told_a_few_times():
    """A message every 30 s for 200 minutes: at most 3 warnings. After that no message moves, and warnings follow."""
    rhythm = [(float(now), {0: IDLE, 1: Report(False, False, min(now, 12_000) // 30, 3)}) for now in range(13_000)]
    told = times(Patience(10, 0.0), rhythm)
    assert len([now for now in told if now < 12_000]) <= 3
    assert [now for now in told if now >= 12_000] != []


def test_who_must_not_speak_never_looks():
    assert not Patience(float("inf"), 0.0).wants_to_look(1e9)
