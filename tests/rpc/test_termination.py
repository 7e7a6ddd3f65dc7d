"""The decision to close a world, from reports and in a simulation; what a wait for that says, and when."""

import random

import pytest

from jdistgrad.rpc.closing import Patience, Survey, SurveyReport as Report, describe
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.mailbox import WorkCount


def conclude(survey, *reports):
    survey.reports = dict(enumerate(reports))
    return survey.conclude()


QUIET = Report(closing=True, busy=False, sent=3, received=3)


def test_two_equal_quiet_rounds_are_needed():
    survey = Survey(2)
    assert not conclude(survey, QUIET, QUIET)
    assert conclude(survey, QUIET, QUIET)


@pytest.mark.parametrize(
    "other",
    [
        Report(closing=False, busy=False, sent=3, received=3),
        Report(closing=True, busy=True, sent=3, received=3),
        Report(closing=True, busy=False, sent=4, received=3),
    ],
    ids=["not closing", "busy", "a message on its way"],
)
def test_no_end_while(other):
    survey = Survey(2)
    assert [conclude(survey, QUIET, other) for _ in range(2)] == [False, False]


class Dying:
    """Simulated workers that reply to messages, some of which die; each survivor notices that in its own time."""

    def __init__(self, chance, size=4, budget=40):
        self.chance, self.size, self.budget = chance, size, budget
        self.work, self.under_way = [WorkCount(rank, size) for rank in range(size)], []
        self.dead, self.lost = set(), [set() for _ in range(size)]

    def send(self, source):
        target = self.chance.randrange(self.size)
        if target not in self.lost[source]:
            self.work[source].sending(target)
            self.under_way.append((source, target))

    def deliver(self):
        source, target = self.under_way.pop(self.chance.randrange(len(self.under_way)))
        if target not in self.dead and source not in self.lost[target]:
            self.work[target].received(source)
            if self.budget and self.chance.random() < 0.9:
                self.budget -= 1
                self.send(target)

    def report(self, rank):
        while self.under_way and self.chance.random() < 0.4:
            self.deliver()
        self.lost[rank] |= {one for one in self.dead if self.chance.random() < 0.5}
        sent, received, _ = self.work[rank].counts(self.lost[rank])
        return Report(True, False, sent, received, lost=tuple(sorted(self.lost[rank])))


@pytest.mark.parametrize("deaths", [0, 2])
@pytest.mark.parametrize("seed", range(50))
def test_no_message_between_those_alive_is_under_way_at_the_end(seed, deaths):
    world = Dying(random.Random(seed))
    for rank in (0, 1, 2, 3, 3, 3):
        world.send(rank)
    survey, done = Survey(world.size), False
    while not done:
        if len(world.dead) < deaths and world.chance.random() < 0.3:
            world.dead.add(world.chance.randrange(1, world.size))
        for rank in set(range(world.size)) - world.dead:
            survey.reports[rank] = world.report(rank)
        for one in world.lost[0]:
            survey.awaited.discard(one)
        done = survey.complete and survey.conclude()
    assert not [message for message in world.under_way if not set(message) & world.dead]


# What a wait for the end says, and when.

WORKERS = [WorkerInfo(rank, f"worker{rank}") for rank in range(3)]
IDLE, OUTSIDE = Report(True, False, 3, 3), Report(False, False, 3, 3)
SLEEP, WAIT = ("time.sleep", 0, 73.4), ("threading.Event.wait", 2, 5.0)


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
    return [now for now, reports in looks if now >= patience.next_look and patience.ends(reports, now)]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda now: Report(True, True, now, 3), [10, 20, 40, 80]),
        (lambda now: Report(False, True, now, 3), []),
        (lambda now: OUTSIDE, [20, 30, 50, 90]),
    ],
    ids=["all want to close, whatever moves", "others work", "nothing moves"],
)
def test_it_speaks_unless_others_work(other, told):
    assert times(Patience(10, 0.0), [(float(now), {0: IDLE, 1: other(now)}) for now in range(100)]) == told


def test_programs_that_are_still_now_and_then_are_told_a_few_times():
    """A message every 30 s for 200 minutes: at most 3 warnings. After that no message moves, and warnings follow."""
    rhythm = [(float(now), {0: IDLE, 1: Report(False, False, min(now, 12_000) // 30, 3)}) for now in range(13_000)]
    told = times(Patience(10, 0.0), rhythm)
    assert len([now for now in told if now < 12_000]) <= 3
    assert [now for now in told if now >= 12_000] != []
