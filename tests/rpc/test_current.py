"""Slots: threads in one scope share its slot, and scopes that are in use at the same time have separate slots."""

from jdistgrad.rpc.current import Slots
from jdistgrad.rpc.scopes import Scope


def test_threads_in_one_scope_share_its_slot():
    slots, first, second = Slots(), Scope(1), Scope(2)
    assert [slots.take(first), slots.take(second), slots.take(first)] == [0, 1, 0]
    slots.free(0)
    assert (slots.at(0), slots.at(1)) == (first, second)
    slots.free(0)
    assert slots.at(0) is None
    assert [slots.take(second), slots.take(first)] == [1, 0]
    assert slots.at(7) is None
