"""Schedules: golden lists, written by hand, the text form, and what is refused. No world."""

import doctest

import pytest
from hypothesis import given, settings, strategies as st

from jdistgrad import pipeline
from jdistgrad.errors import ScheduleError
from jdistgrad.pipeline import (
    Action,
    Costs,
    Kind,
    Schedule,
    check,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from jdistgrad.schedules import forecasting, schedule as schedule_module

GOLDEN = {
    "GPipe": (gpipe(2, 2), "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"),
    "1F1B": (
        one_f_one_b(3, 4),
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3",
    ),
    "1F1B, fewer microbatches than workers": (one_f_one_b(3, 1), "0F0,0B0\n1F0,1B0\n2F0,2B0"),
    "interleaved": (
        interleaved(2, 2, 2),
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1",
    ),
    "interleaved, a round of one": (
        interleaved(2, 3, 2),
        "0F0,0F1,2F0,2F1,0F2,2B0,2B1,2F2,0B0,0B1,2B2,0B2\n1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1B1,3F2,3B2,1B2",
    ),
    "zero bubble": (
        zero_bubble(3, 3),
        "0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2\n1F0,1F1,1I0,1F2,1I1,1W0,1I2,1W1,1W2\n2F0,2I0,2F1,2I1,2F2,2I2,2W0,2W1,2W2",
    ),
    "V": (
        zbv(2, 3),
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0I1,0W1,0I2,0W2\n"
        "1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2",
    ),
    "forward only": (forward_only(2, 3, 2), "0F0,0F1,2F0,2F1,0F2,2F2\n1F0,1F1,3F0,3F1,1F2,3F2"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_lists(name):
    schedule, expected = GOLDEN[name]
    assert str(schedule) == expected
    assert Schedule.parse(expected) == schedule


def test_properties():
    schedule = zbv(3, 5)
    assert schedule.placement == (0, 1, 2, 2, 1, 0)
    assert (schedule.stages, schedule.workers, schedule.microbatches, schedule.trains) == (6, 3, 5, True)
    assert repr(schedule) == "<Schedule of 6 stages on 3 workers, 5 microbatches>"
    assert not forward_only(3, 2).trains
    assert str(Action(Kind.FORWARD, 2, 0)) == "2F0"


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_order_is_complete_ends_and_survives_its_text(workers, microbatches, chunks):
    uneven = Costs(forward=0.7, input=0.9, weight=0.4, message=0.3)
    for schedule in (
        gpipe(workers, microbatches),
        interleaved(workers, microbatches, chunks),
        zero_bubble(workers, microbatches),
        zbv(workers, microbatches),
        zbv(workers, microbatches, uneven),
        forward_only(workers, microbatches, chunks),
    ):
        check(schedule)
        assert (schedule.workers, schedule.microbatches) == (workers, microbatches)
        assert Schedule.parse(schedule.text()) == schedule
    assert interleaved(workers, microbatches, 1) == one_f_one_b(workers, microbatches)


def test_a_file_of_pytorch_is_read():
    text = """0UNSHARD,0F0,0SEND_F0,,(0F1;3B0)OVERLAP_F_B,3RECV_F1,"3F1",3F0,0B0,3I1,3W1,0B1,0REDUCE_GRAD,0RESHARD\r
1RECV_F0,1F0,,2F0,2SEND_F0,3SEND_B1,1F1,2F1,2B0,2RECV_B0,1B0,2B1,1B1\r
"""
    schedule = Schedule.parse(text)
    assert schedule.placement == (0, 1, 1, 0)
    assert str(schedule) == "0F0,0F1,3B0,3F1,3F0,0B0,3I1,3W1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1"


def test_workers_without_actions_survive_the_text():
    schedule = Schedule((1,), ((), (Action(Kind.FORWARD, 0, 0),), ()))
    assert Schedule.parse(schedule.text()) == schedule
    assert Schedule.parse("0F0,0B0\n\n1F0,1B0").placement == (0, 2)
    check(schedule)


def test_text_that_is_no_schedule():
    with pytest.raises(ScheduleError, match=r"Line 2, cell 2: '\(1F1;0B0\)FUSED' is no action"):
        Schedule.parse("0F0\n1F0,(1F1;0B0)FUSED")
    for text in ("0F0,0X0", "0F", "0F0\n0F1", "0F0\n2F0", ""):
        with pytest.raises(ScheduleError):
            Schedule.parse(text)


FORWARD = Action(Kind.FORWARD, 0, 0)


@pytest.mark.parametrize(
    ("placement", "actions"),
    [
        ((), ((FORWARD,),)),
        ((0, 2), ((FORWARD,), ())),
        ((0, 1), ((FORWARD,), (FORWARD,))),
        ((0,), (("0F0",),)),
        ((0,), ((Action(Kind.FORWARD, 0, -1),),)),
        ((0,), ((Action(Kind.FORWARD, 3, 0),),)),
    ],
)
def test_malformed_schedules(placement, actions):
    with pytest.raises(ScheduleError):
        Schedule(placement, actions)


@pytest.mark.parametrize("count", [0, 1.5])
def test_counts(count):
    for make in (gpipe, one_f_one_b, zero_bubble, zbv, forward_only):
        with pytest.raises(ScheduleError, match="workers= of at least 1"):
            make(count, 4)
        with pytest.raises(ScheduleError):
            make(3, count)
    with pytest.raises(ScheduleError):
        interleaved(3, 4, count)


@pytest.mark.parametrize(
    "text", ["\ufeff0F0,0B0\r\n1F0,\t1B0\r\n", '\n"0F0", 0B0 \n"1F0","1B0",\n\n', "0F0,0B0\n(1F0; 1B0)OVERLAP_F_B"]
)
def test_text_as_spreadsheets_and_editors_write_it(text):
    assert Schedule.parse(text).text() == "0F0,0B0\n1F0,1B0"


@pytest.mark.parametrize("module", [forecasting, schedule_module])
def test_examples_in_docstrings(module):
    result = doctest.testmod(module, extraglobs=vars(pipeline))
    assert result.attempted > 0
    assert result.failed == 0
