"""References: their owners, the operations on them, and the errors of operations that are refused."""

import copy
import operator
import time

import numpy as np
import pytest
from helpers.programs import identity
from helpers.worlds import make, on_worker0

import jdistgrad as jd


def slow(x, seconds):
    time.sleep(seconds)
    return x


@on_worker0
def test_remote_and_to_here(world):
    last = jd.world_size() - 1
    rref = jd.remote(last, make, args=(4,))
    assert rref.owner == jd.worker_info(f"worker{last}")
    assert rref.is_owner() == (last == 0)
    assert rref.to_here().tolist() == [0, 1, 2, 3]
    assert rref.creation().result() is None


@on_worker0
def test_an_own_value(world):
    value = np.ones(3)
    rref = jd.RRef(value)
    assert rref.is_owner()
    assert rref.owner == jd.worker_info()
    assert rref.local_value() is rref.to_here() is value


@on_worker0
def test_use_before_the_value_is_made(world):
    """A third worker may request the value before the message that creates it has reached the owner."""
    rref = jd.remote(jd.world_size() - 1, slow, args=(5, 0.2))
    assert jd.rpc_sync(0, operator.add, args=(rref, 1)) == 6
    assert jd.rpc_sync(min(1, jd.world_size() - 1), operator.add, args=(rref, 1)) == 6


@on_worker0
def test_local_value_elsewhere_is_refused(big_world):
    rref = jd.remote(2, make, args=(3,))
    with pytest.raises(jd.NotOwnerError, match=r"local_value\(\) of RRef\(.* on worker2 .* called on worker0"):
        rref.local_value()


class Tally:
    def __init__(self, start):
        self.count = start

    def add(self, x):
        self.count += x
        return self.count


@on_worker0(leftovers=1)
def test_methods_are_called_where_the_object_lives(world):
    tally = jd.remote(jd.world_size() - 1, Tally, args=(10,))
    assert tally.rpc_sync().add(1) == 11
    assert tally.rpc_async().add(x=2).result() == 13
    assert tally.remote().add(3).to_here() == 16
    with pytest.raises(AttributeError):
        tally.rpc_sync().subtract(1)
    with pytest.raises(jd.CallTimeoutError):
        jd.remote(0, slow, args=(tally, 0.5)).rpc_sync(timeout=0.05).add(1)


@on_worker0
def test_equality_hash_and_copies(world):
    rref, other = jd.RRef(1), jd.RRef(1)
    again = jd.rpc_sync(jd.world_size() - 1, identity, args=(jd.by_reference(rref),))
    assert again == rref
    assert hash(again) == hash(rref)
    assert rref != other
    assert rref != 1
    assert copy.deepcopy({"r": rref})["r"] is rref
    assert copy.copy(rref) is rref
