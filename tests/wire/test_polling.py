"""The naps of a polling thread."""

from hypothesis import given, strategies as st

from jdistgrad.wire import polling


@given(st.floats(polling.SPIN, 1e6), st.booleans())
def test_a_nap_is_a_small_share_of_the_quiet_time(quiet, may_spin):
    nap = polling.nap(quiet, may_spin=may_spin)
    assert polling.SHORTEST <= nap <= (polling.LONGEST if may_spin else polling.LONGEST_BESIDE_OTHERS)
    assert nap <= max(polling.SHORTEST, quiet / polling.SHARE)


def test_spinning_ends():
    assert polling.nap(0.0, may_spin=True) == 0
    assert polling.nap(polling.SPIN, may_spin=True) > 0
    assert polling.nap(0.0, may_spin=False) > 0
