"""Reports of steps, made of answers of workers whose times are known."""

import re

import pytest

from jdistgrad import pipeline as pp
from jdistgrad.pipeline.report import Report
from jdistgrad.pipeline.shares import Done
from jdistgrad.schedules.forecasting import LEFT, WIDTH

NOON = 1e9  # the workers' clocks show the time of day


def answer(*times):
    return Done(None, [], [tuple(NOON + one for one in each) for each in times], 1, [])


def in_whole():
    """Two stages; the second worker has heard of the step 1 s later. The halves of backward passes take 2 s and 3 s."""
    first = answer((0, 0, 0, 2), (2, 10, 12, 15))
    second = answer((1, 3, 3, 4), (4, 4, 6, 9))
    return Report(pp.gpipe(2, 1), {1: (0,)}, [first, second], 16.0)


def test_costs_are_those_of_whole_backward_passes_and_of_their_halves():
    costs = in_whole().costs
    assert (costs.forward, costs.backward) == ([2, 1], [5, 5])
    assert (costs.input, costs.weight) == ([2, 2], [3, 3])
    assert pp.forecast(pp.zero_bubble(2, 1), costs).seconds == 2 + 1 + 2 + 2 + 3


def test_costs_of_halves_tell_what_a_whole_backward_pass_takes():
    first = answer((0, 0, 0, 2), (2, 10, 10, 11), (11, 11, 11, 14))
    second = answer((0, 2, 2, 3), (3, 3, 3, 8), (8, 8, 8, 9))
    costs = Report(pp.zero_bubble(2, 1), {1: (0,)}, [first, second], 14.0).costs
    assert (costs.input, costs.weight, costs.backward) == ([1, 5], [3, 1], [4, 6])


def test_a_step_without_backward_passes_does_not_know_their_costs():
    report = Report(pp.forward_only(2, 1), {1: (0,)}, [answer((0, 0, 0, 2)), answer((0, 2, 2, 3))], 3.0)
    assert report.forecast.seconds == 3
    with pytest.raises(ValueError, match="forward passes only: take the costs from the report of a training step"):
        _ = report.costs


def test_waits_bubble_and_overhead():
    report = in_whole()
    assert (report.waited, report.computed) == ([8, 2], [7, 6])
    assert report.bubble == pytest.approx(1 - 13 / 32)
    assert report.forecast.seconds == 2 + 1 + 5 + 5
    assert report.overhead == pytest.approx((16 - 13) / 2)
    assert "worker 1: computed 6000.000 ms, waited 2000.000 ms" in report.text()


def test_the_picture_has_one_clock_for_all_workers():
    boxes = re.findall(r'<rect stroke=.* x="(.+?)" .* width="(.+?)" .*<title>(\d[FBIW]\d): ', in_whole().svg())
    scale = (WIDTH - LEFT - 12) / 16
    found = {name: (round((float(x) - LEFT) / scale, 1), round(float(width) / scale, 1)) for x, width, name in boxes}
    assert found == {"0F0": (0, 2), "0B0": (10, 5), "1F0": (3, 1), "1B0": (4, 5)}
