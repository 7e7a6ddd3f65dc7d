"""The arithmetic of weighted reference counting, over random histories of copies and drops; and the way home."""

from fractions import Fraction

from hypothesis import given, strategies as st

from jdistgrad.rpc.owned import WHOLE, Weight


def value(weight):
    return Fraction(weight.units, 2**weight.scale)


@given(st.lists(st.tuples(st.sampled_from(["copy", "drop"]), st.integers(0, 100)), max_size=60))
def test_everything_comes_home_in_any_history(history):
    holders, returned = [WHOLE], Weight(0)
    for what, k in history:
        if what == "copy" and holders:
            kept, given_away = holders.pop(k % len(holders)).split()
            holders += [kept, given_away]
        elif what == "drop" and len(holders) > 1:
            returned = returned + holders.pop(k % len(holders))
            assert WHOLE - returned  # other holders still have weight: the owner must keep the value
    for holder in holders:
        returned = returned + holder
    assert not WHOLE - returned


def test_a_chain_of_copies_never_runs_out():
    weight, kept = WHOLE, []
    for _ in range(1000):
        rest, weight = weight.split()
        kept.append(rest)
    assert value(sum(kept, weight)) == 1


def test_a_long_lived_holder_gives_copies_cheaply():
    weight = WHOLE
    for _ in range(20_000):
        weight, _ = weight.split()
    assert weight.scale == 32


@given(st.integers(1, 3), st.lists(st.booleans(), min_size=1, max_size=20))
def test_what_goes_to_and_fro_does_not_get_finer(partners, who_keeps):
    weight, others = WHOLE, [Weight(0)] * partners
    for k in range(100):
        weight, given_away = weight.split()
        other, back = (others[k % partners] + given_away).split()
        others[k % partners] = other if who_keeps[k % len(who_keeps)] else Weight(0)
        weight = weight + back
    assert weight.scale == 64
