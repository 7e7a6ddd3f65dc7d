"""The table of scopes: data that several workers keep under one id until the scope is closed."""

import itertools

import pytest

import jdistgrad as jd
from jdistgrad.rpc.current import Slots
from jdistgrad.rpc.scopes import REMEMBERED, Scope, ScopeTable
from jdistgrad.wire.message import COUNTER_BITS, worker_of


def test_ids_have_their_worker_in_the_top_bits_and_count_below():
    table = ScopeTable(513)
    first, second = next(table.ids), next(table.ids)
    assert first == 513 << COUNTER_BITS
    assert second == first + 1
    assert worker_of(second) == 513


def test_a_closed_scope_is_not_entered_again():
    table = ScopeTable(1)
    table.enter(42)
    assert table.release(42) is not None
    assert table.identifiers() == []
    for use in (table.enter, table.find):
        with pytest.raises(jd.ContextError, match="context 0:42 has been closed") as caught:
            use(42)
        assert caught.value.context == 42


def test_so_many_closed_scopes_are_remembered_and_no_more():
    table = ScopeTable(0)
    for identifier in range(REMEMBERED + 1):
        table.release(identifier)
    with pytest.raises(jd.ContextError):
        table.enter(1)
    assert table.enter(0).id == 0  # forgotten, so treated as new


def test_closing_tells_whom_to_tell_and_lets_go_of_everything():
    scope = Scope(1)
    scope.content(list).append("kept")
    for peer in (2, 3, 2):
        scope.includes(peer)
    assert scope.peers() == {2, 3}
    assert scope.close() == ({2, 3}, [["kept"]])
    assert scope.closed
    assert scope.peers() == set()
    assert scope.close() == (set(), [])
    for enter in (lambda: scope.content(list), lambda: scope.includes(1)):
        with pytest.raises(jd.ContextError):
            enter()


@pytest.mark.parametrize("order", list(itertools.permutations(["first call", "second call", "release"])))
def test_calls_and_the_release_in_any_order_leave_an_empty_table(order):
    table, refused = ScopeTable(1), 0
    for message in order:
        if message == "release":
            table.release(42)
        else:
            try:
                table.enter(42).content(list).append(message)
            except jd.ContextError:
                refused += 1
    assert refused == 2 - order.index("release")
    assert table.identifiers() == []


def test_no_scope_begins_through_a_lost_worker():
    """Its opener would not know of this worker. A scope that was entered before goes on; its opener has been asked."""
    table = ScopeTable(0)
    before, new, other = (2 << COUNTER_BITS | number for number in range(3))
    opened_by_the_lost = 1 << COUNTER_BITS
    entered = table.enter(before, caller=1)
    table.lost.add(1)
    assert table.enter(before, caller=1) is entered
    for refused, caller in [(new, 1), (opened_by_the_lost, 2)]:
        with pytest.raises(jd.WorkerLostError):
            table.enter(refused, caller=caller)
    assert table.enter(other, caller=2).id == other
    assert table.identifiers() == [before, other]


def test_threads_in_one_scope_share_its_slot():
    slots, first, second = Slots(), Scope(1), Scope(2)
    assert [slots.take(first), slots.take(second), slots.take(first)] == [0, 1, 0]
    slots.free(0)
    assert (slots.at(0), slots.at(1)) == (first, second)
    slots.free(0)
    assert slots.at(0) is None
    assert [slots.take(second), slots.take(first)] == [1, 0]
    assert slots.at(7) is None
