"""The detection of silent peers, driven by given times."""

import pytest
from hypothesis import example, given, strategies as st

from jdistgrad.rpc.peers import Liveness


def followed(liveness, awaited, *times):
    """Return (time, peers to ask, peers to give up) for each of these times, without times that have no such peers."""
    looks = [(now, *liveness.look(awaited, now)) for now in times]
    return [(now, ask, lost) for now, ask, lost in looks if ask or lost]


def test_a_silent_peer_is_asked_and_then_given_up():
    liveness = Liveness(interval=1.0, limit=4.0)
    times = [10 + k / 2 for k in range(9)]
    assert followed(liveness, [4], *times) == [(11, [4], []), (12, [4], []), (13, [4], []), (14, [], [4])]


def test_a_sign_of_life_starts_the_time_anew():
    liveness = Liveness(interval=1.0, limit=4.0)
    assert followed(liveness, [4], 0, 0.5, 1, 1.5, 2, 2.5) == [(1, [4], []), (2, [4], [])]
    liveness.heard(4)
    times = [3 + k / 2 for k in range(8)]
    assert followed(liveness, [4], *times) == [(3.5, [4], []), (4.5, [4], []), (5.5, [4], []), (6.5, [], [4])]


def test_time_before_somebody_waits_does_not_count():
    liveness = Liveness(interval=1.0, limit=4.0)
    liveness.look([1], 0.0)
    liveness.look([], 1.0)
    assert followed(liveness, [1, 2], 100.0, 100.5, 101.0) == [(101, [1, 2], [])]


@pytest.mark.parametrize("gap", [5.0, 71.0, 1e6])
def test_who_stood_still_gives_nobody_up_for_it(gap):
    """A gap between two looks means that this worker stood still: it asks its peers and gives them the full time."""
    liveness = Liveness(interval=1.0, limit=4.0)
    liveness.look([1, 2], 10.0)
    woke = 10.0 + gap
    assert followed(liveness, [1, 2], woke, woke + 0.5) == [(woke + 0.5, [1, 2], [])]
    liveness.heard(2)
    assert followed(liveness, [1, 2], *(woke + k / 2 for k in range(2, 8)))[-1] == (woke + 3.5, [2], [1])


def test_who_stands_still_again_and_again_still_notices():
    """A worker that runs only now and then, as on a crowded machine, still notices lost peers."""
    liveness = Liveness(interval=1.0, limit=4.0)
    assert followed(liveness, [1], *range(0, 1000, 50))[-1][2] == [1]


@given(
    st.floats(0.01, 100),
    st.floats(0.01, 100),
    st.lists(st.floats(0, 200), min_size=1, max_size=60),
    st.sets(st.integers(0, 60)),
)
@example(10.0, 39.94649299564842, [0.0, 10.0, 4.40715134680858, 10.0, 10.0, 10.0, 10.0], {0, 2})
def test_nobody_is_given_up_who_was_not_asked(interval, limit, gaps, heard):
    liveness, now, asked = Liveness(interval, limit), 0.0, 0
    for k, gap in enumerate(gaps):
        now += gap
        ask, lost = liveness.look([7], now)
        asked += len(ask)
        if lost:
            assert asked >= 2
            return
        if k in heard:
            liveness.heard(7)
            asked = 0
