"""Numbers of frames: each is new once, in whatever order the frames come."""

from hypothesis import given, strategies as st

from jdistgrad.wire.numbering import EARLY_KEPT, Arrivals


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
    assert arrivals._early == set()
    assert not any(arrivals.is_new(number) for number in order)


def test_a_frame_that_never_comes_costs_bounded_memory():
    arrivals = Arrivals()
    assert all(arrivals.is_new(number) for number in range(1, 5 * EARLY_KEPT))
    assert len(arrivals._early) <= EARLY_KEPT
    assert not any(arrivals.is_new(number) for number in (1, EARLY_KEPT, 5 * EARLY_KEPT - 1))
