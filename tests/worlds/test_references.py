"""References: where values are, how they travel, and that nothing is left of them."""

import copy
import gc
import operator
import pickle
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jdistgrad as jd
from jdistgrad.rpc.current import current_worker
from jdistgrad.wire import environment


def make(n):
    return jnp.arange(n, dtype=jnp.float32)


def total(x, y=0):
    return float(jnp.sum(x) + y)


def identity(x):
    return x


def slow(x, seconds):
    time.sleep(seconds)
    return x


def owned_here():
    """How many values this worker owns for others, once what has been dropped has come home."""
    gc.collect()
    return len(current_worker().owned)


def wait_until_owned(rank, count):
    gc.collect()  # what pytest.raises has seen lives in a cycle
    deadline = time.monotonic() + 20
    while (found := jd.rpc_sync(rank, owned_here)) != count:
        assert time.monotonic() < deadline, f"worker {rank} owns {found} values, not {count}"
        time.sleep(0.01)


def test_remote_and_to_here(world):
    def body():
        last = jd.world_size() - 1
        rref = jd.remote(last, make, args=(4,))
        assert rref.owner == jd.worker_info(f"worker{last}")
        assert rref.is_owner() == (last == 0)
        assert rref.to_here().tolist() == [0, 1, 2, 3]
        assert rref.creation().result() is None

    world.drive(body)


def test_an_own_value(world):
    def body():
        value = np.ones(3)
        rref = jd.RRef(value)
        assert rref.is_owner()
        assert rref.owner == jd.worker_info()
        assert rref.local_value() is value
        assert rref.to_here() is value

    world.drive(body)


def owner_rank(x):
    return jd.worker_info().rank, float(x.sum())


def test_an_argument_arrives_as_its_value_wherever_it_runs(world):
    def body():
        for owner in range(jd.world_size()):
            for callee in range(jd.world_size()):
                rref = jd.remote(owner, make, args=(5,))
                assert jd.rpc_sync(callee, owner_rank, args=(rref,)) == (callee, 10.0)
                assert jd.rpc_sync(callee, total, args=({"deep": [rref]}["deep"][0],), kwargs={"y": 1}) == 11

    world.drive(body)


def tree_total(tree):
    return sum(float(jnp.sum(leaf)) for leaf in tree["leaves"]) + tree["extra"]


def test_references_deep_in_a_pytree(world):
    def body():
        owners = [k % jd.world_size() for k in range(6)]
        tree = {"leaves": [jd.remote(owner, make, args=(k,)) for k, owner in enumerate(owners)], "extra": 1}
        assert jd.rpc_sync(0, tree_total, args=(tree,)) == 1 + sum(k * (k - 1) / 2 for k in range(6))

    world.drive(body)


def is_reference(x):
    return isinstance(x, jd.RRef), x.owner.rank, x.is_owner()


def test_by_reference_passes_the_reference(world):
    def body():
        for owner in range(jd.world_size()):
            for callee in range(jd.world_size()):
                rref = jd.remote(owner, make, args=(3,))
                found = jd.rpc_sync(callee, is_reference, args=(jd.by_reference(rref),))
                assert found == (True, owner, owner == callee)

    world.drive(body)


def test_by_reference_takes_references_only(world):
    def body():
        with pytest.raises(TypeError, match="takes an RRef, not int"):
            jd.by_reference(3)

    world.drive(body)


def pass_on(rref, path):
    """Hand a reference from worker to worker; the last one fetches it from its owner."""
    if not path:
        return rref.to_here()
    return jd.rpc_sync(path[0], pass_on, args=(jd.by_reference(rref), path[1:]))


def test_a_reference_is_passed_on_through_all_workers(world):
    def body():
        n = jd.world_size()
        rref = jd.remote(n - 1, make, args=(4,))
        assert pass_on(rref, [k % n for k in range(1, 12)]).tolist() == [0, 1, 2, 3]

    world.drive(body)


def remote_of_remote(owner, n):
    return jd.remote(owner, make, args=(n,))


def test_a_reference_to_a_reference(world):
    def body():
        n = jd.world_size()
        outer = jd.remote(n - 1, remote_of_remote, args=((n - 1) // 2, 3))
        inner = outer.to_here()
        assert inner.owner.rank == (n - 1) // 2
        assert inner.to_here().tolist() == [0, 1, 2]
        assert jd.rpc_sync(0, is_reference, args=(outer,))[0]  # one step is taken, not two

    world.drive(body)


def test_references_among_results(world):
    def body():
        found = jd.rpc_sync(jd.world_size() - 1, remote_of_remote, args=(0, 4))
        assert found.is_owner()
        assert found.local_value().tolist() == [0, 1, 2, 3]

    world.drive(body)


def test_use_before_the_value_is_made(world):
    """A third worker may ask the owner before the owner has heard of the value."""

    def body():
        rref = jd.remote(jd.world_size() - 1, slow, args=(5, 0.2))
        assert jd.rpc_sync(0, operator.add, args=(rref, 1)) == 6
        assert jd.rpc_sync(min(1, jd.world_size() - 1), operator.add, args=(rref, 1)) == 6

    world.drive(body)


def test_a_failed_remote_raises_where_the_value_is_needed(world):
    def body():
        last = jd.world_size() - 1
        rref = jd.remote(last, operator.truediv, args=(1, 0))
        for needed in (rref.to_here, lambda: jd.rpc_sync(0, total, args=(rref,)), rref.creation().result):
            with pytest.raises(ZeroDivisionError):
                needed()
        assert jd.rpc_sync(last, operator.add, args=(1, 1)) == 2

    world.drive(body)


def test_timeouts_of_references(world):
    def body():
        rref = jd.remote(jd.world_size() - 1, slow, args=(5, 0.4))
        with pytest.raises(jd.CallTimeoutError, match=r"within 0\.05 s"):
            rref.to_here(timeout=0.05)
        assert rref.to_here() == 5

    world.drive(body)


def test_local_value_elsewhere_is_refused(big_world):
    def body():
        rref = jd.remote(2, make, args=(3,))
        with pytest.raises(jd.NotOwnerError, match=r"local_value\(\) of RRef\(.* on worker2 .* called on worker0"):
            rref.local_value()

    big_world.drive(body)


class Tally:
    def __init__(self, start):
        self.count = start

    def add(self, x):
        self.count += x
        return self.count


def test_methods_are_called_where_the_object_lives(world):
    def body():
        tally = jd.remote(jd.world_size() - 1, Tally, args=(10,))
        assert tally.rpc_sync().add(1) == 11
        assert tally.rpc_async().add(x=2).result() == 13
        assert tally.remote().add(3).to_here() == 16
        with pytest.raises(AttributeError, match="subtract"):
            tally.rpc_sync().subtract(1)
        with pytest.raises(jd.CallTimeoutError):
            jd.remote(0, slow, args=(tally, 0.5)).rpc_sync(timeout=0.05).add(1)

    world.drive(body, leftovers=1)


def test_equality_hash_and_copies(world):
    def body():
        rref, other = jd.RRef(1), jd.RRef(1)
        again = jd.rpc_sync(jd.world_size() - 1, identity, args=(jd.by_reference(rref),))
        assert again == rref
        assert hash(again) == hash(rref)
        assert rref != other
        assert rref != 1
        assert copy.deepcopy({"r": rref})["r"] is rref
        assert copy.copy(rref) is rref

    world.drive(body)


def test_a_reference_shows_its_id_and_owner(world):
    def body():
        assert repr(jd.RRef(1)).startswith("RRef(0:")
        assert repr(jd.RRef(1)).endswith("on worker0 (rank 0))")

    world.drive(body)


def test_pickling_by_oneself_is_refused(world):
    def body():
        with pytest.raises(jd.EncodingError, match=r"inside a call.*to_here"):
            pickle.dumps(jd.RRef(1))

    world.drive(body)


def test_dropped_references_free_the_value(world):
    def body():
        last = jd.world_size() - 1
        rref = jd.remote(last, make, args=(3,))
        copies = [pass_on_reference(rref, rank) for rank in range(jd.world_size())]
        wait_until_owned(last, 1)
        del rref
        wait_until_owned(last, 1)
        del copies
        wait_until_owned(last, 0)

    world.drive(body)


def pass_on_reference(rref, rank):
    return jd.rpc_sync(rank, identity, args=(jd.by_reference(rref),))


def test_a_reference_nobody_keeps_is_free_at_once(world):
    def body():
        last = jd.world_size() - 1
        for k in range(50):
            jd.remote(last, make, args=(k,))
        wait_until_owned(last, 0)

    world.drive(body)


def test_a_failed_encoding_costs_no_weight(world):
    def body():
        last = jd.world_size() - 1
        rref = jd.remote(last, make, args=(3,))
        for _ in range(5):
            with pytest.raises((jd.EncodingError, TypeError)):
                jd.rpc_sync(last, never_called, args=(jd.by_reference(rref), [rref, unsendable()]))
        del rref
        wait_until_owned(last, 0)

    world.drive(body)


def never_called(reference, pair):
    raise TypeError("a local world hands everything over: here the call arrives")


def unsendable():
    return (k for k in range(3))


def test_garbage_cycles_do_not_keep_values(world):
    def body():
        cycle = {"rref": jd.remote(jd.world_size() - 1, make, args=(3,))}
        cycle["self"] = cycle

    world.drive(body)


def test_late_answers_still_return_their_references(world):
    def body():
        last = jd.world_size() - 1
        with pytest.raises(jd.CallTimeoutError):
            jd.rpc_sync(last, slow_reference, args=(0.2,), timeout=0.05)
        time.sleep(0.4)
        wait_until_owned(last, 0)

    world.drive(body)


def slow_reference(seconds):
    time.sleep(seconds)
    return jd.RRef(jnp.ones(3))


def own_one():
    return jd.RRef(jnp.ones(3))


def test_answers_nobody_looks_at_still_return_their_references(world):
    def body():
        last = jd.world_size() - 1
        for _ in range(3):
            jd.rpc_async(last, own_one)
        wait_until_owned(last, 0)

    world.drive(body)


def test_a_call_that_cannot_be_read_still_returns_its_references(world):
    from jdistgrad.rpc import functions

    def gone(reference):
        return reference

    def body():
        last = jd.world_size() - 1
        rref = jd.remote(last, make, args=(3,))
        if last != 0 and environment.launched():
            with pytest.raises(jd.FunctionError, match="registered as 'gone'"):
                jd.rpc_sync(last, gone, args=(jd.by_reference(rref),))
        del rref
        wait_until_owned(last, 0)

    def main():
        me = jd.init()
        if me.rank == 0:
            functions.register(gone, "gone")
            body()
        assert jd.shutdown() == []

    world.run(main)


class Necromancer:
    """Its destructor uses references."""

    def __del__(self):
        jd.RRef("last words")


def test_destructors_may_use_references(world):
    def body():
        last = jd.world_size() - 1
        rrefs = [jd.remote(last, Necromancer) for _ in range(5)]
        assert all(rref.creation().result() is None for rref in rrefs)
        del rrefs
        wait_until_owned(last, 0)

    world.drive(body)


def test_many_references_made_and_dropped(world):
    def body():
        last = jd.world_size() - 1
        for _ in range(10):
            rrefs = [jd.remote(last, identity, args=(k,)) for k in range(100)]
            assert sum(rref.to_here() for rref in rrefs[::10]) == sum(range(0, 100, 10))
        del rrefs
        wait_until_owned(last, 0)

    world.drive(body)


def test_what_is_left_is_told_at_shutdown(world):
    def main():
        jd.init()
        kept = jd.RRef(5)
        left = jd.shutdown()
        assert any("still owns" in line for line in left)
        assert any("still holds a reference" in line for line in left)
        return kept

    kept = world.run(main)[0]
    with pytest.raises(jd.NotInitializedError, match=r"no world here.*Call init\(\)"):
        kept.to_here()


def test_a_reference_of_a_closed_world_is_refused_in_the_next(world):
    def main():
        jd.init()
        stale = jd.RRef(5)
        jd.shutdown()
        jd.init()
        with pytest.raises(jd.StaleReferenceError, match="belongs to a world that has been shut down"):
            stale.to_here()
        with pytest.raises(jd.StaleReferenceError, match="sending"):
            jd.rpc_sync(jd.world_size() - 1, identity, args=(jd.by_reference(stale),))
        assert jd.shutdown() == []

    world.run(main)
