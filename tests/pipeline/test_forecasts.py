"""Forecasts, compared with the formulas of the literature and with times worked out by hand. No world."""

import xml.etree.ElementTree as ElementTree

import pytest

from jdistgrad.errors import ScheduleError
from jdistgrad.pipeline import (
    Action,
    Costs,
    Kind,
    Schedule,
    forecast,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zbv,
    zero_bubble,
)

WORKERS, MICROBATCHES = (1, 2, 3, 4, 7, 8, 16), (1, 2, 3, 5, 8, 16, 21, 32, 64)
SIZES = [(p, m) for p in WORKERS for m in MICROBATCHES]


def bubble(p, m, units):
    """Return the part that p - 1 idle units of time have in a step with ``units`` for each of m microbatches."""
    return pytest.approx((p - 1) / (units * m + p - 1), rel=0, abs=1e-9)


@pytest.mark.parametrize("p", WORKERS)
def test_one_stage_per_worker(p):
    for m in MICROBATCHES:
        for schedule, recordings in (
            (gpipe(p, m), [m] * p),
            (one_f_one_b(p, m), [min(m, p - worker) for worker in range(p)]),
            (forward_only(p, m), [0] * p),
        ):
            result = forecast(schedule)
            assert result.bubble == bubble(p, m, 1)
            assert list(result.recordings) == recordings


@pytest.mark.parametrize("p", WORKERS)
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved(p, v):
    for m in [m for m in (p, 2 * p, 5 * p, 64) if m % p == 0 and m <= 64]:
        result = forecast(interleaved(p, m, v))
        assert result.bubble == bubble(p, m, v)
        assert list(result.recordings) == [min(v * m, v * p + p - 1 - 2 * worker) for worker in range(p)]
        assert forecast(forward_only(p, m, v)).bubble == bubble(p, m, v)


@pytest.mark.parametrize("p", WORKERS)
def test_zero_bubble(p):
    for m in [m for m in MICROBATCHES if m >= p]:
        result = forecast(zero_bubble(p, m))
        assert result.bubble == bubble(p, m, 3)
        assert result.recordings == (p,) * p


@pytest.mark.parametrize("p", WORKERS)
def test_v(p):
    for m in [m for m in (p, 2 * p - 2, 2 * p - 1, 2 * p, 3 * p, 64) if m >= 1]:
        result = forecast(zbv(p, m))
        if m == p or m >= 2 * p - 2:
            assert result.bubble == bubble(p, m, 6)
        assert max(result.recordings) == min(2 * m, 2 * p)
        if m >= 2 * p - 1:
            assert result.recordings == (2 * p,) * p


def test_any_number_of_microbatches_costs_at_most_as_much_as_full_rounds():
    for p, m, v in [(4, 5, 2), (4, 3, 3), (3, 7, 2), (8, 1, 4)]:
        rounds = -(-m // p) * p
        assert forecast(interleaved(p, m, v)).seconds <= forecast(interleaved(p, rounds, v)).seconds
        assert max(forecast(interleaved(p, m, v)).recordings) <= min(v * m, v * p + p - 1)


def test_uneven_costs_by_hand():
    costs = Costs(forward=[1, 2, 3], backward=[4, 5, 6], action=0.5, message=0.25)
    result = forecast(Schedule.parse("0F0,0F1,0B0,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1"), costs)
    assert [end for _, end in result.spans[1]] == [4.25, 7.75, 14.25, 19.75, 22.25, 25.75, 32.25, 37.75]
    assert result.spans[0] == ((0, 1.5), (1.5, 3), (20, 24.5), (38, 42.5))
    assert result.times[Action(Kind.BACKWARD, 0, 1)] == (38, 42.5)
    assert result.seconds == 42.5
    assert result.busy == (12, 36)
    assert result.bubble == pytest.approx(1 - 48 / 85)
    assert result.recordings == (2, 2)


@pytest.mark.parametrize(
    ("overhead", "steps"),
    [(0, (1.188, 1.062, 1.094)), (0.05, (1.256, 1.128, 1.181)), (0.1, (1.325, 1.194, 1.269))],
)
def test_what_overhead_costs(overhead, steps):
    """Compare with the numbers of an independent simulator: four workers, 16 microbatches, step over ideal step."""
    whole = Costs(action=overhead, message=overhead)
    halved = Costs(forward=0.5, input=0.5, weight=0.5, action=overhead, message=overhead)
    found = [(one_f_one_b(4, 16), whole), (zero_bubble(4, 16), whole), (interleaved(4, 16, 2), halved)]
    assert [forecast(*pair).seconds / 48 for pair in found] == pytest.approx(steps, abs=6e-4)


def test_v_with_costs_is_no_slower_than_without():
    for costs in (Costs(forward=[1, 1, 1, 1, 1, 4]), Costs(input=0.5, weight=2), Costs(0.5, input=0.6, weight=0.4)):
        for m in (5, 8, 12):
            assert forecast(zbv(3, m, costs), costs).seconds <= forecast(zbv(3, m), costs).seconds
            assert max(forecast(zbv(3, m, costs)).recordings) <= 6
    skewed = Costs(forward=[1, 1, 1, 1, 1, 4])
    assert any(zbv(3, m, skewed) != zbv(3, m) for m in (5, 8, 12))


@pytest.mark.parametrize("cost", [-1, float("nan"), [1, 2]])
def test_costs_are_numbers_of_seconds(cost):
    with pytest.raises(ScheduleError, match=r"The cost forward= is .* or one for each of 3 stages"):
        forecast(one_f_one_b(3, 2), Costs(forward=cost))


def test_the_table():
    text = forecast(one_f_one_b(3, 4)).text().splitlines()
    assert text[0] == "3 stages on 3 workers, 4 microbatches: step 18, bubble 33.3%, recordings 3"
    assert [line.split() for line in text[2:]] == [
        ["0", "12", "33.3%", "3", "0"],
        ["1", "12", "33.3%", "2", "1"],
        ["2", "12", "33.3%", "1", "2"],
    ]
    assert repr(forecast(gpipe(3, 4))).startswith("<Forecast of 3 stages on 3 workers")


def test_the_picture():
    result = forecast(zero_bubble(3, 4))
    picture = ElementTree.fromstring(result._repr_svg_())
    tooltips = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert all(f"{action}: {start:g} to {end:g}" in tooltips for action, (start, end) in result.times.items())
    words = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"worker 0", "worker 1", "worker 2", "forward", "input gradient", "weight gradient", "2F0"} <= set(words)
    assert "backward" not in words
    assert len({colour(picture, f"0F{m}") for m in range(4)} | {colour(picture, "0I0"), colour(picture, "0W0")}) == 6
    assert colour(picture, "0F2") == colour(picture, "1F2")


def colour(picture, action):
    boxes = picture.iter("{http://www.w3.org/2000/svg}rect")
    return next(box.get("fill") for box in boxes if any((one.text or "").startswith(f"{action}:") for one in box))
