"""The owner's table of values and the holders' table of claims, with messages in any order."""

import random
import types

import pytest

from jdistgrad.rpc.owned import REMEMBERED, WHOLE, OwnerTable
from jdistgrad.rpc.references import References


def test_a_fetch_may_overtake_the_creation():
    table = OwnerTable()
    asked = table.value(1)
    assert not asked.done()
    table.announce(1).value.set_result("value")
    assert asked.result(0) == "value"


def test_the_memory_of_freed_values_does_not_grow():
    table = OwnerTable()
    for identifier in range(REMEMBERED + 100):
        table.announce(identifier)
        table.release_all([(identifier, WHOLE)])
    assert len(table._freed) == REMEMBERED


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_messages_ends_with_an_empty_table(seed):
    chance = random.Random(seed)
    parts, whole = [], WHOLE
    for _ in range(chance.randrange(8)):
        whole, part = whole.split()
        parts.append(part)
    messages = [("drop", part) for part in [whole, *parts]] + [("announce", None)]
    chance.shuffle(messages)
    table = OwnerTable()
    for k, (what, weight) in enumerate(messages):
        assert (len(table.entries) == 1) == (k > 0)
        if what == "drop":
            table.release_all([(5, weight)])
        else:
            table.announce(5)
    assert len(table.entries) == 0


def test_all_references_of_one_id_share_a_claim():
    claims = References(types.SimpleNamespace(rank=0, world=""), caller=None)
    first, second = claims.claim(1, 0, WHOLE), claims.claim(1, 0, WHOLE)
    assert first is second
    assert not claims.drops
    del first, second
    both = WHOLE + WHOLE
    [(owner, drop)] = claims.dropped()
    assert (owner, drop.body) == (0, [(1, both.units, both.scale)])
