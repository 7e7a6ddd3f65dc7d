"""Checkpoints of whole jobs: every kind of value comes back bit for bit, on any number of workers; errors."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import json
import math
import os
import pathlib
import resource
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers.programs import X, affine, make_params
from helpers.worlds import last, nap, rank

import jdistgrad as jd
from jdistgrad._compat import weakly_typed
from jdistgrad.rpc.waits import waits_of
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving import files
from jdistgrad.wire.polling import poll

pytestmark = pytest.mark.one_process  # under mpirun each rank has a temporary folder of its own


def values(seed):
    """Return leaves of every kind, other ones for each seed."""
    return {
        "float": jnp.arange(6.0).reshape(2, 3) + seed,
        "nan": jnp.array([jnp.nan, -0.0, jnp.inf]) * seed,
        "bfloat16": jnp.full((3, 1), seed, jnp.bfloat16),
        "float8": jnp.full(5, seed, jnp.float8_e4m3fn),
        "int4": jnp.full(3, seed % 7, jnp.int4),
        "complex": jnp.array([1j, 2.0]) * seed,
        "bool": jnp.array([True, seed % 2 == 0]),
        "weak": weakly_typed(jnp.arange(3.0) * seed),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
        "raw": jax.random.PRNGKey(seed),
        "empty": jnp.zeros((0, 3)),
        "numpy": np.arange(4.0) / seed,
        "wide": np.array([2**60 + seed]),
        "uint4": np.full(3, seed % 7, ml_dtypes.uint4),
        "scalar": np.float64(0.1 * seed),
        "numbers": [2**70 + seed, 0.1 * seed, seed * 1j, seed % 2 == 0, f"step {seed}", bytes([seed])],
        "none": None,
        "nested": ({"b": jnp.float32(seed)}, [jnp.int8(seed)]),
        "state": optax.adam(0.1).init({"w": jnp.ones(seed % 2 + 2)[:2] * seed}),
    }


def bits(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        weak = getattr(leaf, "weak_type", None)
        return type(leaf).__name__, str(leaf.dtype), leaf.shape, weak, np.asarray(leaf).tobytes()
    return type(leaf).__name__, leaf


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        other = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        assert bits(other) == bits(leaf), path


def test_every_kind_of_value_comes_back_bit_for_bit(tmp_path):
    with jd.local_workers(3):
        here = jd.RRef(values(3))
        jd.save(tmp_path, 7, {"mine": values(1), "there": jd.remote(2, values, args=(2,)), "here": here})
    with jd.local_workers(3):
        given = {"mine": values(8), "there": jd.remote(1, values, args=(8,)), "here": jd.RRef(values(8))}
        step, found = jd.restore(tmp_path, given)
        assert step == 7
        assert found["there"] is given["there"]
        same(found["mine"], values(1))
        same(found["there"].to_here(), values(2))
        same(found["here"].to_here(), values(3))


def trained(workers, folder, seed, steps, *, begins_at):
    """Go on from the last checkpoint up to a step, and save; return the four values of two optimizers."""
    with jd.local_workers(workers):
        references = [jd.remote(rank(k), make_params, args=(seed + k,)) for k in range(4)]
        optimizers = {
            "adam": jd.DistributedOptimizer(optax.adam(optax.linear_schedule(0.1, 0.0, 20)), references[:3]),
            "trace": jd.DistributedOptimizer(optax.sgd(0.1, momentum=0.9), references[3:]),
        }
        step, _ = jd.restore(folder, optimizers=optimizers)
        assert step == begins_at
        for _ in range(step, steps):
            with jd.context() as ctx:
                jd.grad(squares)(references)
                for optimizer in optimizers.values():
                    optimizer.step(ctx)
        jd.save(folder, steps, optimizers=optimizers)
        return [one.to_here() for one in references]


def squares(references):
    return sum(jnp.sum(jd.rpc_sync(one.owner, affine, args=(one, X)) ** 2) for one in references)


def test_optimizers_go_on_on_other_numbers_of_workers(tmp_path):
    trained(3, tmp_path / "a", 5, 1, begins_at=0)
    resumed = trained(4, tmp_path / "a", 50, 2, begins_at=1)
    same(resumed, trained(3, tmp_path / "b", 5, 2, begins_at=0))


def params():
    return {"w": jnp.linspace(-1, 1, 10).reshape(5, 2), "b": jnp.float32(2)}


def ranks_alike(size, folder, steps, *, begins):
    """Train on all ranks alike, from the last checkpoint on, and save. Return the parameters, states and keys."""
    tx = optax.sgd(0.1, momentum=0.9)

    def main():
        me = jd.init()
        sharding, mine = jd.shard_state(tx), params()
        state, key = sharding.init(mine), jax.random.key(me.rank + 100 * (1 - begins))
        step, (mine, state, key) = jd.restore(folder, (mine, jd.sharded(tx, state, mine), jd.per_worker(key)))
        assert (step == 0) == begins
        for _ in range(step, steps):
            updates, state = sharding.update(jax.tree.map(jnp.cos, mine), state, mine)
            mine, key = optax.apply_updates(mine, updates), jax.random.split(key)[0]
        jd.save(folder, steps, (mine, jd.sharded(tx, state, mine), jd.per_worker(key)))
        found = mine, jd.gather_state(tx, state, mine), key
        jd.shutdown()
        return found

    return jd.spawn(main, size)


def test_ranks_that_do_the_same_go_on_on_other_numbers_of_ranks(tmp_path):
    ranks_alike(3, tmp_path, 1, begins=True)
    ranks_alike(2, tmp_path, 2, begins=False)
    resumed = ranks_alike(4, tmp_path, 3, begins=False)
    unbroken = ranks_alike(3, tmp_path / "other", 3, begins=True)
    for mine, state, _ in resumed:
        same((mine, state), unbroken[0][:2])
    for one, other in zip(resumed[:2], unbroken, strict=False):  # the third's key was dropped on two ranks
        same(one[2], other[2])
    same(resumed[3][2], jax.random.split(jax.random.key(103))[0])


def in_groups(size, groups, folder, seed, *, saves=False):
    """Save, or restore, momenta that each group divides; return each worker's, gathered in its group."""
    tx, mine = optax.sgd(0.1, momentum=0.9), {"w": jnp.zeros(5), "b": jnp.zeros((3, 1))}

    def main():
        me = jd.init()
        group = jd.collectives.of_this_world(next(group for group in groups if me.rank in group))
        state = jax.tree.map(lambda x: x + seed + me.rank, jd.shard_state(tx, collectives=group).init(mine))
        if saves:
            jd.save(folder, 1, jd.sharded(tx, state, mine, group))
        else:
            _, state = jd.restore(folder, jd.sharded(tx, state, mine, group))
        found = jd.gather_state(tx, state, mine, collectives=group)
        jd.shutdown()
        return found

    return jd.spawn(main, size)


def test_slices_of_some_of_their_workers_are_refused_and_replace_nothing(tmp_path):
    """As after the loss of a worker: the others can save, but not what it had."""
    tx, mine = optax.sgd(0.1, momentum=0.9), {"w": jnp.zeros(6)}

    def main():
        me, group = jd.init(), jd.collectives.of_this_world()
        state = jax.tree.map(lambda x: x + me.rank, jd.shard_state(tx, collectives=group).init(mine))
        marked = jd.sharded(tx, state, mine, group)
        jd.save(tmp_path, 1, marked)
        if me.rank != 1:
            with pytest.raises(jd.CheckpointError):
                jd.save(tmp_path, 2, marked, workers=[0, 2], keep=1)
        jd.barrier()
        step, found = jd.restore(tmp_path, marked)
        jd.shutdown()
        return step, found, state

    for step, found, state in jd.spawn(main, 3):
        assert step == 1
        same(found, state)


def test_local_sgd_goes_on_on_another_number_of_ranks(tmp_path):
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)

    def main(steps):
        me, tx, params = jd.init(), jd.local_sgd(optax.sgd(0.1), every=2, outer=outer), jnp.zeros(2)
        state = tx.init(params)
        own = state._replace(inner=jd.per_worker(state.inner), exchange=jd.per_worker(state.exchange))
        start, (params, state) = jd.restore(tmp_path, (params, own))
        for _ in range(start, steps):
            updates, state = tx.update(params - 3 - me.rank, state, params)
            params = optax.apply_updates(params, updates)
        own = state._replace(inner=jd.per_worker(state.inner), exchange=jd.per_worker(state.exchange))
        jd.save(tmp_path, steps, (params, own))
        jd.shutdown()
        return params

    jd.spawn(main, 2, args=(4,))
    found = jd.spawn(main, 3, args=(8,))
    start, state = jnp.zeros(2), outer.init(jnp.zeros(2))
    for size in (2, 2, 3, 3):
        way = start - np.mean([start + 0.19 * (3 + k - start) for k in range(size)], 0)  # by two steps of a tenth each
        updates, state = outer.update(way, state, start)
        start = optax.apply_updates(start, updates)
    np.testing.assert_allclose(found, [start] * 3, rtol=1e-6)


def test_each_group_gets_the_slices_of_its_own(tmp_path):
    saved = in_groups(4, [(0, 2), (3, 1)], tmp_path, 1, saves=True)
    assert float(saved[1][0].trace["w"][0]) == 4  # of worker 3, the first of its group
    for found, expected in zip(in_groups(4, [(0, 2), (3, 1)], tmp_path, 50), saved, strict=True):
        same(found, expected)
    for found in in_groups(3, [(1, 0, 2)], tmp_path, 50):
        same(found, saved[0])
    with pytest.raises(jd.CheckpointError):
        in_groups(5, [(0, 1, 2, 3), (4,)], tmp_path, 50)


def of_pairs(folder, seed, callers, *, saves=False):
    """Save, or restore, by some of four workers, each worker's own, and momenta that each of two pairs divides."""
    tx, params = optax.sgd(0.1, momentum=0.9), {"w": jnp.zeros(4)}

    def main():
        me, found = jd.init(), None
        if me.rank in callers:
            pair = [rank for rank in callers if rank // 2 == me.rank // 2]
            group, own = jd.collectives.of_this_world(pair), jd.RRef(jnp.full(3, seed + me.rank))
            state = jax.tree.map(lambda x: x + seed + me.rank // 2, jd.shard_state(tx, collectives=group).init(params))
            trees = {"number": jd.per_worker(seed + me.rank), "value": jd.per_worker(own)}
            trees["state"] = jd.sharded(tx, state, params, group)
            if saves:
                jd.save(folder, 1, trees, workers=callers)
            else:
                _, trees = jd.restore(folder, trees, workers=callers)
                whole = jd.gather_state(tx, trees["state"], params, collectives=group)
                found = trees["number"], float(own.to_here()[0]), float(whole[0].trace["w"][-1])
        jd.shutdown()
        return found

    return dict(enumerate(jd.spawn(main, 4)))


def test_workers_that_are_left_of_a_world_get_back_what_they_had_themselves(tmp_path):
    everybody, left = [0, 1, 2, 3], [0, 2, 3]
    of_pairs(tmp_path / "all", 0, everybody, saves=True)
    of_pairs(tmp_path / "left", 0, left, saves=True)
    assert of_pairs(tmp_path / "all", 50, left) == {0: (0, 0, 0), 1: None, 2: (2, 2, 1), 3: (3, 3, 1)}
    assert of_pairs(tmp_path / "left", 50, everybody) == {0: (0, 0, 0), 1: (51, 51, 0), 2: (2, 2, 1), 3: (3, 3, 1)}


def test_an_optimizer_of_each_worker_and_values_of_its_own(tmp_path):
    def main(seed, restores):
        me = jd.init()
        mine, shared = jd.RRef(make_params(seed + me.rank)), jd.RRef(jnp.arange(3.0) + seed)
        optimizer = jd.DistributedOptimizer(optax.sgd(0.1, momentum=0.9), [mine])
        trees = {"own": jd.per_worker({"x": mine}), "alike": shared}
        if restores:
            step, found = jd.restore(tmp_path, trees, jd.per_worker(optimizer))
            assert (step, found["own"]["x"] is mine) == (1, True)
        else:
            jd.save(tmp_path, 1, trees, jd.per_worker(optimizer))
        found = mine.to_here(), shared.to_here()
        jd.shutdown()
        return found

    jd.spawn(main, 3, args=(0, False))
    for k, (mine, shared) in enumerate(jd.spawn(main, 3, args=(70, True))):
        same(mine, make_params(k))
        same(shared, jnp.arange(3.0))


def test_without_a_checkpoint_everything_stays(tmp_path):
    with jd.local_workers(3):
        step, (found, key) = jd.restore(tmp_path / "none", (values(4), jd.per_worker(jax.random.key(1))))
    assert step == 0
    same(found, values(4))
    same(key, jax.random.key(1))


def test_what_is_no_folder_of_checkpoints_is_not_one_without_checkpoints(tmp_path):
    (tmp_path / "model.npz").write_bytes(b"")
    with jd.local_workers(1):
        jd.save(tmp_path / "run", 20, jnp.ones(3))
        with pytest.raises(jd.CheckpointError, match=r"run/20 is one checkpoint\. .*/run, and its step: step=20"):
            jd.restore(tmp_path / "run" / "20", jnp.zeros(3))
        with pytest.raises(jd.CheckpointError, match=r"model\.npz is a file\. Give the folder"):
            jd.restore(tmp_path / "model.npz", jnp.zeros(3))


def test_only_complete_checkpoints_are_restored_and_the_latest_are_kept(tmp_path):
    with jd.local_workers(3):
        for step in (10, 20, 30, 100):
            jd.save(tmp_path, step, jnp.float32(step), keep=2)
        assert sorted(one.name for one in tmp_path.iterdir()) == ["100", "30"]
        for keep in (0, -math.inf):
            with pytest.raises(ValueError):
                jd.save(tmp_path, 200, jnp.float32(200), keep=keep)
        (tmp_path / "100").rename(tmp_path / ".saving-100-torn")
        (tmp_path / "200").mkdir()  # has no manifest
        assert jd.restore(tmp_path, jnp.float32(0)) == (30, 30)
        jd.save(tmp_path, 30, jnp.float32(31), keep=2)  # again: the new one counts
        assert jd.restore(tmp_path, jnp.float32(0)) == (30, 31)
        jd.save(tmp_path, 40, jnp.float32(40), keep=2)
        assert sorted(one.name for one in tmp_path.iterdir()) == ["200", "30-1", "40"]
        assert jd.restore(tmp_path, jnp.float32(0), step=30) == (30, 31)
        with pytest.raises(jd.CheckpointError, match=r"no complete checkpoint of step 7 in .*there are: 30, 40"):
            jd.restore(tmp_path, jnp.float32(0), step=7)


@contextlib.contextmanager
def no_file_larger_than(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def big(seed):
    return jax.random.normal(jax.random.key(seed), (300, 1000))


def test_a_part_that_cannot_be_written_leaves_the_last_checkpoint(tmp_path):
    with jd.local_workers(3):
        there = jd.remote(2, big, args=(1,))
        jd.save(tmp_path, 1, there)
        said = r"worker2 .* could not write its part of step 2 .*OSError: \[Errno 27\] File too large.*step 1 is still"
        with no_file_larger_than(1 << 19), pytest.raises(jd.CheckpointError, match=said):
            jd.save(tmp_path, 2, there)
        assert [one.name for one in tmp_path.iterdir()] == ["1"]
        other = jd.remote(1, big, args=(5,))
        assert jd.restore(tmp_path, other)[0] == 1
        same(other.to_here(), big(1))


def in_thread(errors, *call):
    def run():
        try:
            jd.save(*call)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_save_waits_for_one_that_another_thread_has_begun(tmp_path):
    with jd.local_workers(3):
        goes_on, errors = threading.Event(), list[BaseException]()
        there, late = jd.remote(1, big, args=(1,)), jd.remote(2, big_after, args=(goes_on, 2))
        first = in_thread(errors, tmp_path, 1, (there, late))
        while not list(tmp_path.glob(".saving-1-*/rank1/*")):
            time.sleep(0.01)
        jd.save(tmp_path / "another", 1, there)  # does not wait
        second = in_thread(errors, tmp_path, 2, there)
        time.sleep(0.1)
        goes_on.set()
        first.join()
        second.join()
        assert not errors
        others = jd.remote(2, big, args=(5,)), jd.remote(1, big, args=(6,))
        assert jd.restore(tmp_path, others, step=1)[0] == 1
        same([one.to_here() for one in others], [big(1), big(2)])
        assert jd.restore(tmp_path, others[0])[0] == 2


def big_after(event, seed):
    event.wait()
    return big(seed)


def fail(seconds):
    raise ValueError("boom")


def test_a_save_waits_for_that_of_another_thread_of_its_worker(tmp_path):
    """Otherwise those of two steps, in which this worker is at the same time, would be taken for a disagreement."""
    both_begun = threading.Barrier(3, timeout=60)

    def main():
        jd.init()
        tree, worker = jd.per_worker(jnp.ones(3)), current_worker()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            if jd.rank() < 2:
                first = pool.submit(contextvars.copy_context().run, jd.save, tmp_path, 100, tree)
                assert poll(lambda: any(", 100)" in one for one in waits_of(worker)), 60)
                second = pool.submit(contextvars.copy_context().run, jd.save, tmp_path, 200, tree)
                poll(lambda: any(", 200)" in one for one in waits_of(worker)), 0.5)
                both_begun.wait()
                first.result(60)
                second.result(60)
            else:
                both_begun.wait()
                jd.save(tmp_path, 100, tree)
                jd.save(tmp_path, 200, tree)
        jd.shutdown()

    jd.spawn(main, 3)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["100", "200"]


def test_ctrl_c_ends_a_save_on_all_ranks_and_the_next_one_is_right(tmp_path, monkeypatch):
    pressed, publish = threading.Event(), files.publish

    def interrupted(*args):
        if not pressed.is_set():
            pressed.set()
            raise KeyboardInterrupt
        return publish(*args)

    monkeypatch.setattr(files, "publish", interrupted)

    def main():
        me = jd.init()
        with pytest.raises(KeyboardInterrupt if me.rank == 0 else jd.CheckpointError):
            jd.save(tmp_path, 1, jd.per_worker(jnp.ones(3)))
        jd.save(tmp_path, 1, jd.per_worker(jnp.arange(3.0) + me.rank))
        found = jd.restore(tmp_path, jd.per_worker(jnp.ones(3)))
        jd.shutdown()
        return found

    same(jd.spawn(main, 3), [(1, jnp.arange(3.0) + rank) for rank in range(3)])


def test_a_disk_that_a_worker_does_not_see(tmp_path, monkeypatch):
    seen, blind = pathlib.Path.is_dir, threading.Event()
    monkeypatch.setattr(pathlib.Path, "is_dir", lambda path: seen(path) and not (blind.is_set() and jd.rank() == 1))

    def main():
        me = jd.init()
        tree = [jd.remote(owner, big, args=(me.rank + owner,)) for owner in (0, 1)]
        jd.save(tmp_path, 1, jd.per_worker(tree))
        blind.set()
        said = r"worker1 .* does not see .*/1,.* a disk that all workers see"
        with pytest.raises(jd.CheckpointError, match=said):
            jd.restore(tmp_path, jd.per_worker(tree))
        same([one.to_here() for one in tree], [big(me.rank), big(me.rank + 1)])
        jd.shutdown()

    jd.spawn(main, 3)


def test_damaged_files_are_named(tmp_path):
    with jd.local_workers(3):
        tree = big(1), jd.remote(2, big, args=(1,))
        jd.save(tmp_path, 1, tree)
        for rank in (0, 2):
            jd.save(tmp_path, 2, tree)
            files = [one for one in (tmp_path / "2" / f"rank{rank}").rglob("*") if one.is_file()]
            os.truncate(max(files, key=lambda one: one.stat().st_size), 50_000)
            said = rf"restore: worker{rank} .* could not read .*2/rank{rank}: .*Nothing was restored on any worker"
            with pytest.raises(jd.CheckpointError, match=said):
                jd.restore(tmp_path, tree)
            shutil.rmtree(tmp_path / "2")
        assert jd.restore(tmp_path, tree)[0] == 1


def test_a_value_that_was_not_made_is_named(tmp_path):
    with jd.local_workers(3, timeout=1):
        jd.save(tmp_path, 1, jd.remote(2, big, args=(1,)))
        failed, late = jd.remote(2, fail, args=(1,)), jd.remote(2, nap, args=(3,))
        with pytest.raises(jd.CheckpointError, match=r"worker2 .*ValueError: boom"):
            jd.save(tmp_path, 2, failed)
        with pytest.raises(jd.CheckpointError, match=r"worker2 .*ValueError: boom"):
            jd.restore(tmp_path, failed)
        with pytest.raises(jd.CheckpointError, match="worker2"):
            jd.save(tmp_path, 2, late)
        assert [one.name for one in tmp_path.iterdir()] == ["1"]
        assert late.to_here(timeout=20) == 3


def make_w(shape, dtype="float32"):
    return {"w": jnp.ones(shape, dtype)}


WRONG = {
    "shape": lambda: (jd.remote(2, make_w, args=((2, 3),)), 1.0),
    "dtype": lambda: (jd.remote(2, make_w, args=((3, 2), "bfloat16")), 1.0),
    "a leaf more": lambda: (jd.remote(2, make_w, args=((3, 2),)), {"x": 1.0}),
    "a leaf less": lambda: (jd.remote(2, make_w, args=((3, 2),)),),
    "kind": lambda: (jd.remote(2, make_w, args=((3, 2),)), "text"),
    "structure": lambda: (jd.remote(2, make_params, args=(1,)), 1.0),
}


def test_what_does_not_fit_is_named_and_nothing_is_restored(tmp_path):
    with jd.local_workers(3):
        jd.save(tmp_path, 1, (jd.remote(1, make_w, args=((3, 2),)), 2.0))
        for what, make in WRONG.items():
            other = make()
            before = other[0].to_here()
            said = r"trees\[0\]\['w'\] is float32\[3, 2\], expected float32\[2, 3\]" if what == "shape" else "trees"
            with pytest.raises(jd.CheckpointError, match=said):
                jd.restore(tmp_path, other)
            same(other[0].to_here(), before)


class Odd:
    pass


@dataclasses.dataclass(frozen=True, order=True, repr=False)
class Alike:
    number: int

    def __repr__(self):
        return "Alike"


def alike():
    return {Alike(1): jnp.ones(2), Alike(2): jnp.zeros(2)}


class Callable:
    def __init__(self):
        self.w = jnp.ones(3)

    def __call__(self, x):
        return self.w * x


def deleted():
    array = jnp.arange(3.0)
    array.delete()
    return array


def gradient_of_a_reference():
    return jd.grad(lambda p: p.to_here().sum())(jd.remote(1, jnp.ones, args=(3,)))


def test_what_cannot_be_saved_is_refused(tmp_path):
    with jd.local_workers(3):
        for tree in (
            [1, Odd()],
            {"f": Callable()},
            {"r": jd.remote(1, Odd)},
            alike(),
            jd.remote(1, alike),
            {"gone": deleted()},
            {"g": gradient_of_a_reference()},
        ):
            with pytest.raises(jd.CheckpointError, match=r"trees|\[Alike\]"):
                jd.save(tmp_path, 1, tree)
        with pytest.raises(TypeError):
            jd.save(tmp_path, 1, None, optax.adam(0.1).init(jnp.ones(3)))
        for step in (1.5, -1, {"w": jnp.ones(3)}):
            with pytest.raises(ValueError):
                jd.save(tmp_path, step)
        for path in ("gs://bucket/run", pathlib.Path("s3://bucket/run"), tmp_path / "a\\b"):
            for call in (lambda path=path: jd.save(path, 1), lambda path=path: jd.restore(path)):
                with pytest.raises(ValueError):
                    call()
        assert not list(tmp_path.iterdir())


def test_what_belongs_to_another_world_is_not_mistaken_for_what_has_its_id(tmp_path):
    def made(value):
        reference = jd.remote(1, jnp.full, args=(3, value, jnp.float32))
        return {"r": reference}, jd.DistributedOptimizer(optax.adam(0.1), [reference])

    with jd.local_workers(2):
        stale, stale_optimizer = made(1.0)
        jd.save(tmp_path / "a", 1, stale, stale_optimizer)
    with jd.local_workers(2):
        tree, optimizer = made(9.0)
        for trees, optimizers, place in ((stale, optimizer, r"trees\['r'\]"), (tree, stale_optimizer, "optimizers")):
            with pytest.raises(jd.StaleReferenceError, match=place):
                jd.save(tmp_path / "b", 2, trees, optimizers)
            with pytest.raises(jd.StaleReferenceError):
                jd.restore(tmp_path / "a", trees, optimizers)
        np.testing.assert_array_equal(tree["r"].to_here(), np.full(3, 9.0))
        jd.restore(tmp_path / "a", tree, optimizer)
        np.testing.assert_array_equal(tree["r"].to_here(), np.full(3, 1.0))
    assert not (tmp_path / "b").exists() or not list((tmp_path / "b").iterdir())


def test_the_fault_of_one_rank_is_the_error_of_all(tmp_path):
    said = []

    def main():
        me = jd.init()
        try:
            jd.save(tmp_path, 1, jd.per_worker(Odd() if me.rank == 1 else 1.0))
        except jd.CheckpointError as error:
            said.append(str(error))
        try:
            jd.save(tmp_path, 2, {"x": 1.0} if me.rank == 2 else {"y": 1.0})
        except (jd.CheckpointError, jd.DisagreementError) as error:
            said.append(str(error))
        jd.shutdown()

    jd.spawn(main, 3)
    assert sum("trees is a Odd, which cannot be saved" in one for one in said) == 3
    assert sum(one.startswith("worker1 (rank 1): ") for one in said) == 2  # the others
    assert sum("have different trees" in one for one in said) == 3
    assert not list(tmp_path.iterdir())


def test_ranks_that_ask_for_other_steps_are_told(tmp_path):
    def main():
        me = jd.init()
        for step in (1, 2):
            jd.save(tmp_path, step, jnp.float32(step))
        with pytest.raises(jd.DisagreementError, match=r"in restore\('.*', step=[12]\), worker .* step=[12]\). They"):
            jd.restore(tmp_path, jnp.float32(0), step=1 + (me.rank == 2))
        jd.barrier()  # one that comes late would join those that have come together again
        found = jd.restore(tmp_path, jnp.float32(0), step=1)
        jd.shutdown()
        return found

    assert jd.spawn(main, 3) == [(1, 1)] * 3


def test_one_of_three_that_do_three_things_writes_no_checkpoint_alone(tmp_path):
    said = []

    def main():
        me = jd.init()
        nap(0.4 * (me.rank == 2))
        with pytest.raises(jd.DisagreementError) as raised:
            jd.save(tmp_path, me.rank)
        said.append(str(raised.value))
        jd.shutdown()

    jd.spawn(main, 3)
    assert len(said) == 3
    assert not list(tmp_path.iterdir())


def test_groups_restore_one_checkpoint_at_once(tmp_path):
    """Worker 2 comes while worker 0 waits for worker 1, and does not count among these."""

    def main():
        me = jd.init()
        jd.save(tmp_path, 2, jnp.arange(3.0))
        group = np.array([[0, 1], [2, 3]])[me.rank // 2]
        nap((0, 0.4, 0.2, 0.6)[me.rank])
        found = jd.restore(tmp_path, jnp.zeros(3), workers=iter(group))
        jd.shutdown()
        return found

    same(jd.spawn(main, 4), [(2, jnp.arange(3.0))] * 4)


def test_some_workers_save_and_a_context_is_open(tmp_path):
    def main():
        me = jd.init()
        if me.rank == 1:
            with jd.context() as ctx:
                reference = jd.RRef(make_params(3))
                gradient = jd.grad(lambda p: jd.rpc_sync(last(), affine, args=(p, X))[0])(reference)
                jd.save(tmp_path, 3, reference, workers=[1])
                assert jd.restore(tmp_path, reference, workers=[1])[0] == 3
                assert gradient.to_here()["b"][0] == 1
                assert ctx is not None
        jd.barrier()
        jd.shutdown()

    jd.spawn(main, 3)
    manifest = json.loads((tmp_path / "3" / "manifest.json").read_text())
    assert manifest["workers"] == [1]


def test_threads_of_a_driver_save_in_two_folders_at_once(tmp_path):
    with jd.local_workers(3):
        there, errors = jd.remote(1, make_params, args=(3,)), list[BaseException]()
        threads = [in_thread(errors, tmp_path / name, 1, there) for name in "abcd"]
        for one in threads:
            one.join()
        assert not errors
        assert all((tmp_path / name / "1" / "manifest.json").exists() for name in "abcd")
