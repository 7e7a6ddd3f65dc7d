"""Naps of a polling thread."""

from hypothesis import given, strategies as st

from jdistgrad.wire import pacing


@given(st.floats(0, 1e6))
def test_a_nap_is_a_small_share_of_the_quiet_time(quiet):
    nap = pacing.nap(quiet, may_spin=False)
    assert pacing.SHORTEST <= nap <= pacing.LONGEST
    assert nap <= max(pacing.SHORTEST, quiet / pacing.SHARE)


def test_spinning_ends():
    assert pacing.nap(0.0, may_spin=True) == 0
    assert pacing.nap(pacing.SPIN, may_spin=True) > 0
    assert pacing.nap(0.0, may_spin=False) > 0
