"""What ``check`` refuses, and how it says it. No world."""

import pickle
import re

import pytest
from hypothesis import given, settings, strategies as st

from jdistgrad.errors import ScheduleError
from jdistgrad.pipeline import Action, Kind, Schedule, check, forecast, one_f_one_b, zero_bubble


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0F1,0B0\n1F0,1B0,1F1,1B1",
        "0F0,0B0,0B1\n1F0,1F1,1B0,1B1",
        "0F0,0I0\n1F0,1I0,1W0",
        "0F0,0W0\n1F0,1I0,1W0",
        "0F0,0B0,0F0\n1F0,1B0",
        "0F0,0B0,0I0,0W0\n1F0,1B0",
        "0F0,0B0,0W0\n1F0,1B0",
        "0F9\n1F9",
    ],
)
def test_incomplete_schedules(text):
    for refuse in (check, forecast):
        with pytest.raises(ScheduleError):
            refuse(Schedule.parse(text))


@pytest.mark.parametrize(
    ("text", "waiting"),
    [
        # Worker 0 wants the gradient of microbatch 0 before it hands out microbatch 1, which worker 1 wants first.
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "0B0 on worker 0 waits for 1B0, which worker 1 has after 1F1; "
            "1F1 on worker 1 waits for 0F1, which worker 0 has after 0B0",
        ),
        ("0B0,0F0", "0B0 on worker 0 waits for 0F0, which worker 0 has after 0B0"),
        ("0F0,0W0,0I0", "0W0 on worker 0 waits for 0I0, which worker 0 has after 0W0"),
        (
            "0F0,0B0,2F0,2B0\n1F0,1B0",
            "0B0 on worker 0 waits for 1B0, which worker 1 has after 1B0; "
            "1B0 on worker 1 waits for 2B0, which worker 0 has after 0B0",
        ),
    ],
)
def test_workers_that_wait_for_each_other(text, waiting):
    with pytest.raises(ScheduleError, match="would never end: ") as caught:
        check(Schedule.parse(text))
    named = {frozenset(re.findall(r"(\S+) on worker (\d)", waiting))}
    assert all(part in str(caught.value) for part in waiting.split("; "))
    assert {frozenset((str(action), str(worker)) for action, worker in caught.value.waiting)} == named
    assert pickle.loads(pickle.dumps(caught.value)).waiting == caught.value.waiting


def test_a_worker_that_waits_for_a_circle_is_not_named():
    schedule = Schedule.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1")
    with pytest.raises(ScheduleError, match="would never end") as caught:
        check(schedule)
    assert set(caught.value.waiting) == {(Action(Kind.BACKWARD, 0, 0), 0), (Action(Kind.FORWARD, 1, 1), 1)}


def test_skip_connections():
    # Stage 2 takes its inputs from stage 0 alone: it need not wait for stage 1, but stage 0 waits for both.
    sideways = Schedule.parse("0F0,0B0\n1F0,1B0\n2F0,2B0")
    inputs = {1: (0,), 2: (0,)}
    check(sideways, inputs)
    assert forecast(sideways, inputs=inputs).times[Action(Kind.FORWARD, 2, 0)] == (1, 2)
    assert forecast(sideways, inputs=inputs).times[Action(Kind.BACKWARD, 0, 0)] == (4, 6)
    chain = forecast(sideways, inputs={2: (0, 1)})
    assert chain.times == forecast(sideways).times
    assert forecast(sideways, inputs={1: ()}).times[Action(Kind.FORWARD, 1, 0)] == (0, 1)


def test_a_skip_connection_can_make_a_circle():
    schedule = Schedule.parse("0F0,0F1,1F1,1F0\n2F0,2F1")
    check(schedule, {2: (0,)})
    check(schedule)
    backwards = Schedule.parse("0F0,0B0,3F0,3B0\n1F0,2F0,2B0,1B0")
    check(backwards, {1: (), 2: (1,), 3: (2,)} | {3: ()})
    with pytest.raises(ScheduleError):
        check(backwards, {1: (), 3: (0,)})


@pytest.mark.parametrize("inputs", [{1: (1,)}, {0: (2,)}, {7: (0,)}, {2: (-1,)}])
def test_inputs_come_from_earlier_stages(inputs):
    with pytest.raises(ScheduleError):
        check(one_f_one_b(3, 2), inputs)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_random_orders_end_or_name_a_circle(data):
    """Compare with a search that knows nothing of workers and positions: repeated passes over all actions."""
    made = data.draw(st.sampled_from([one_f_one_b(3, 2), zero_bubble(3, 2), zero_bubble(2, 3)]))
    rows = tuple(tuple(data.draw(st.permutations(row))) if data.draw(st.booleans()) else row for row in made.actions)
    schedule = Schedule(made.placement, rows)
    heads = first_actions_left(schedule)
    try:
        check(schedule)
        named = set()
    except ScheduleError as error:
        named = {(worker, action) for action, worker in error.waiting}
    assert named <= heads
    assert bool(named) == bool(heads)


def first_actions_left(schedule):
    rows, done = [list(row) for row in schedule.actions], set()
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row and all(any(one in done for one in options) for options in needs(schedule, row[0])):
                done.add(row.pop(0))
                moved = True
    return {(worker, row[0]) for worker, row in enumerate(rows) if row}


def needs(schedule, action):
    kind, stage, batch = action
    if kind is Kind.FORWARD:
        return [[Action(Kind.FORWARD, stage - 1, batch)]] if stage else []
    if kind is Kind.WEIGHT:
        return [[Action(Kind.INPUT, stage, batch)]]
    after = [Action(half, stage + 1, batch) for half in (Kind.BACKWARD, Kind.INPUT)]
    return [[Action(Kind.FORWARD, stage, batch)]] + ([after] if stage + 1 < schedule.stages else [])
