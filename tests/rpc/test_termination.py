"""The decision to close a world, from given reports, and in a simulation of workers with messages under way."""

import random

import pytest

from jdistgrad.rpc.members.termination import Report, Serving, Survey


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
