"""Numbers of frames: each is new once, in whatever order the frames come."""

from hypothesis import given, strategies as st

from jdistgrad.wire.numbering import FARTHEST, Arrivals


@given(st.lists(st.integers(0, 40), max_size=200))
def test_a_number_is_new_once(numbers):
    arrivals, seen = Arrivals(), set()
    for number in numbers:
        assert arrivals.is_new(number) == (number not in seen)
        seen.add(number)


@given(st.permutations(range(50)))
def test_nothing_is_kept_once_all_have_come(order):
    arrivals = Arrivals()
    assert all(arrivals.is_new(number) for number in order)
    assert arrivals._missing == set()
    assert not any(arrivals.is_new(number) for number in order)


def test_a_frame_that_many_others_overtake_is_new_nevertheless():
    arrivals = Arrivals()
    assert all(arrivals.is_new(number) for number in range(1, 3 * FARTHEST))
    assert arrivals.is_new(0)
    assert not arrivals.is_new(0)


def test_a_number_out_of_all_order_changes_nothing():
    arrivals = Arrivals()
    assert arrivals.is_new(1 << 60)
    assert arrivals.is_new(0)
    assert arrivals._missing == set()
