"""What tells an object from others, and from itself before a change."""

import functools
import threading
import types

import jax
import numpy as np
import pytest

from jdistgrad.rpc.fingerprints import fingerprint


def act(x):
    return x


class Holder:
    def __init__(self, *held):
        self.held = list(held)

    def method(self):
        return self.held


def test_what_tells_a_large_object_from_others_is_small():
    """It is kept as long as what was compiled for the object."""
    array = np.zeros(100_000)
    before = fingerprint(Holder(array))
    array[-1] = 1.0
    assert fingerprint(Holder(array)) != before
    assert len(repr(before)) < 1000


@pytest.mark.parametrize("of", [lambda one: one, lambda one: one.method, lambda one: functools.partial(one, one.held)])
@pytest.mark.parametrize("beside", [act, lambda x: x, jax.jit(lambda x: x), type("Inner", (), {})], ids=range(4))
def test_a_change_beside_a_function_is_seen_and_nothing_else(of, beside):
    class Inner(Holder):
        __call__ = Holder.method

    one, other = Inner(beside, 1.0), Inner(beside, 1.0)
    before = fingerprint(of(one))
    assert fingerprint(of(one)) == before == fingerprint(of(other))
    one.held[1] = 2.0
    assert fingerprint(of(one)) != before


def test_a_function_is_told_from_a_later_one_of_its_name(monkeypatch):
    holder = Holder(act)
    before = fingerprint(holder)
    later = types.FunctionType(act.__code__, globals(), "act")
    monkeypatch.setitem(globals(), "act", later)
    holder.held[0] = later
    assert fingerprint(holder) != before


def test_what_cannot_be_compared_may_have_changed():
    holder = Holder(threading.Lock())
    assert fingerprint(holder) != fingerprint(holder)
