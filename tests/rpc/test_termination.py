"""The decision to close a world, from given reports, and in a simulation of workers with messages under way."""

import random

import pytest

from jdistgrad.rpc.mailbox import WorkCount
from jdistgrad.rpc.members.termination import Report, Serving, Survey
from jdistgrad.wire.message import Kind


def conclude(survey, *reports):
    for rank, report in enumerate(reports):
        survey.add(rank, report)
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
    assert not conclude(survey, QUIET, other)
    assert not conclude(survey, QUIET, other)


def test_work_between_two_rounds_is_seen():
    survey = Survey(2)
    assert not conclude(survey, QUIET, QUIET)
    assert not conclude(survey, Report(True, False, 4, 4), QUIET)
    assert conclude(survey, Report(True, False, 4, 4), QUIET)


def test_the_latest_reports_are_known_between_rounds():
    survey, other = Survey(3), Report(False, False, 0, 0)
    assert survey.known() == {}
    conclude(survey, QUIET, other, QUIET)
    assert survey.known() == {0: QUIET, 1: other, 2: QUIET}
    survey.start()
    survey.add(1, QUIET)
    assert survey.known() == {0: QUIET, 1: QUIET, 2: QUIET}


def test_for_how_long_calls_are_served_makes_no_difference():
    survey = Survey(2)
    for seconds in (1.0, 2.0):
        quiet = conclude(survey, QUIET, Report(True, False, 3, 3, (Serving("f", 0, seconds),)))
    assert quiet


@pytest.mark.parametrize("seed", range(50))
def test_no_message_is_ever_under_way_at_the_end(seed):
    """Simulated workers reply to messages until a budget is spent; deliveries and reports interleave at random."""
    chance, size, budget = random.Random(seed), 4, 30
    sent, received, under_way = [0] * size, [0] * size, []

    def send(source):
        sent[source] += 1
        under_way.append(chance.randrange(size))

    for _ in range(5):
        send(chance.randrange(size))
    survey, done = Survey(size), False
    while not done:
        for rank in range(size):
            while under_way and chance.random() < 0.4:
                target = under_way.pop(chance.randrange(len(under_way)))
                received[target] += 1
                if budget and chance.random() < 0.9:
                    budget -= 1
                    send(target)
            survey.add(rank, Report(True, False, sent[rank], received[rank]))
        done = survey.conclude()
    assert under_way == []
    assert sum(sent) == sum(received)


def test_a_lost_worker_is_left_out():
    survey = Survey(3)
    survey.leave_out(1)
    without = Report(closing=True, busy=False, sent=3, received=3, lost=(1,))
    for quiet in (False, True):
        survey.add(0, without)
        survey.add(2, without)
        assert survey.complete
        assert survey.conclude() is quiet


def test_no_end_while_survivors_have_lost_different_workers():
    survey = Survey(3)
    survey.leave_out(1)
    for _ in range(3):
        survey.add(0, Report(True, False, 3, 3, lost=(1,)))
        survey.add(2, Report(True, False, 3, 3))
        assert not survey.conclude()


def test_messages_of_lost_workers_are_not_counted():
    work = WorkCount(0, 3)
    for peer in (1, 2, 2):
        work.sending(Kind.CALL, peer)
    work.received(1)
    work.serving(2)
    assert work.counts() == (3, 2, 1)
    assert work.counts(lost=[2]) == (1, 1, 1)
    assert work.serves(2)
    work.served(2)
    assert work.counts(lost=[1]) == (2, 1, 0)


class Dying:
    """Simulated workers that reply to messages, some of which die; each survivor notices that in its own time."""

    def __init__(self, chance, size=4, budget=40):
        self.chance, self.size, self.budget = chance, size, budget
        self.work, self.under_way = [WorkCount(rank, size) for rank in range(size)], []
        self.dead, self.lost = set(), [set() for _ in range(size)]

    def send(self, source):
        target = self.chance.randrange(self.size)
        if target not in self.lost[source]:
            self.work[source].sending(Kind.CALL, target)
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


@pytest.mark.parametrize("seed", range(50))
def test_no_message_between_survivors_is_under_way_at_the_end(seed):
    world = Dying(random.Random(seed))
    for rank in (0, 1, 2, 3, 3, 3):
        world.send(rank)
    survey, done = Survey(world.size), False
    while not done:
        if len(world.dead) < 2 and world.chance.random() < 0.3:
            world.dead.add(world.chance.randrange(1, world.size))
        for rank in set(range(world.size)) - world.dead:
            survey.add(rank, world.report(rank))
        for one in world.lost[0]:
            survey.leave_out(one)
        done = survey.complete and survey.conclude()
    assert not [message for message in world.under_way if not set(message) & world.dead]
