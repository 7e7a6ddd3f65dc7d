"""References among arguments and results: delivered as their values, or as references."""

import operator

import jax.numpy as jnp
import pytest
from helpers.worlds import last, make, nap, on_worker0

import jdistgrad as jd


def total(x, y=0):
    return float(jnp.sum(x) + y)


def owner_rank(x):
    return jd.worker_info().rank, float(x.sum())


def is_reference(x):
    return isinstance(x, jd.RRef), x.owner.rank, x.is_owner()


@on_worker0
def test_an_argument_arrives_as_its_value_or_as_the_reference_wherever_it_runs(world):
    for owner in range(jd.world_size()):
        for callee in range(jd.world_size()):
            rref = jd.remote(owner, make, args=(5,))
            assert jd.rpc_sync(callee, owner_rank, args=(rref,)) == (callee, 10.0)
            assert jd.rpc_sync(callee, total, args=(rref,), kwargs={"y": 1}) == 11
            found = jd.rpc_sync(callee, is_reference, args=(jd.by_reference(rref),))
            assert found == (True, owner, owner == callee)


def owners_of(tree):
    return [rref.owner.rank for rref in tree["rrefs"]], float(tree["value"]), tree["extra"]


@on_worker0
def test_by_reference_passes_all_references_in_a_tree(world):
    rrefs = [jd.remote(owner, make, args=(3,)) for owner in range(jd.world_size())]
    passed = jd.by_reference({"rrefs": rrefs, "extra": "x"})
    found = jd.rpc_sync(last(), owners_of, args=(passed | {"value": jd.remote(0, float, args=(2,))},))
    assert found == (list(range(jd.world_size())), 2.0, "x")


def pass_on(rref, path):
    """Hand a reference from worker to worker; the last one fetches it from its owner."""
    if not path:
        return rref.to_here()
    return jd.rpc_sync(path[0], pass_on, args=(jd.by_reference(rref), path[1:]))


@on_worker0
def test_a_reference_is_passed_on_through_all_workers(world):
    n = jd.world_size()
    rref = jd.remote(n - 1, make, args=(4,))
    assert pass_on(rref, [k % n for k in range(1, 12)]).tolist() == [0, 1, 2, 3]


def remote_of_remote(owner, n):
    return jd.remote(owner, make, args=(n,))


@on_worker0
def test_a_reference_to_a_reference(world):
    n = jd.world_size()
    outer = jd.remote(n - 1, remote_of_remote, args=((n - 1) // 2, 3))
    inner = outer.to_here()
    assert inner.owner.rank == (n - 1) // 2
    assert inner.to_here().tolist() == [0, 1, 2]
    assert jd.rpc_sync(0, is_reference, args=(outer,))[0]  # the outer reference is resolved, the inner reference is not


@on_worker0
def test_a_failed_remote_raises_where_the_value_is_needed(world):
    last = jd.world_size() - 1
    rref = jd.remote(last, operator.truediv, args=(1, 0))
    for needed in (rref.to_here, lambda: jd.rpc_sync(0, total, args=(rref,)), rref.creation().result):
        with pytest.raises(ZeroDivisionError):
            needed()
    assert jd.rpc_sync(last, operator.add, args=(1, 1)) == 2


def kinds_of(*args):
    return [type(arg).__name__ for arg in args]


def keys_of(mapping, other):
    return list(mapping), other


@on_worker0
def test_a_dict_that_cannot_be_sorted_keeps_nothing_from_being_delivered(world):
    rref = jd.remote(last(), nap, args=(0.5,))
    odd = {1: "a", "b": rref}
    assert jd.rpc_sync(last(), kinds_of, args=(odd, rref, jd.by_reference(rref))) == ["dict", "float", "RRef"]
    assert jd.rpc_sync(last(), odd_value, args=(odd,)) == 0.5
    assert jd.rpc_sync(last(), keys_of, args=({"b": 1, "a": 2}, rref)) == (["b", "a"], 0.5)


def odd_value(mapping):
    return mapping["b"]
