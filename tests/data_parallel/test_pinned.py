"""Arrays of accelerators on their way through pinned host memory. Here CPU devices play the accelerators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.models import batch, loss, parameters, serial
from helpers.worlds import last, on_every_worker, on_worker0

import jdistgrad as jd
from jdistgrad.collectives.descriptions import describe
from jdistgrad.data_parallel import averages
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.rpc.codec import PickleCodec
from jdistgrad.wire import pinned

pytestmark = pytest.mark.host_memory


@pytest.fixture
def accelerators(monkeypatch):
    """Treat CPU devices as accelerators. Their pinned memory is other memory than that of their arrays."""
    caches = (pinned.in_pinned_memory, averages.host_device)
    monkeypatch.setattr(pinned, "is_far", lambda device: True)
    monkeypatch.setattr(pinned, "_accelerated", None)
    for cached in caches:
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def reduced_in(monkeypatch):
    """The kinds of memory in which this process has reduced gradients."""
    found, average = set(), averages.average_in_chunks

    def noting(bucket, gradients, *args, **settings):
        found.update(kinds(gradients))
        return average(bucket, gradients, *args, **settings)

    monkeypatch.setattr(averages, "average_in_chunks", noting)
    return found


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@on_every_worker
def test_steps_and_averages(accelerators, reduced_in, big_world, rank, size):
    params, batches = parameters(), [batch(one, rows=one + 2) for one in range(size)]
    dp = DataParallel(bucket_cap_mb=2e-4, check_finite=True)
    found = dp.value_and_grad(loss)(params, batches[rank])
    assert_close(found[1], serial(loss, params, batches)[1])
    assert kinds(found) == {"device"}
    own = jax.tree.map(lambda p: p * (rank + 1.0), params)
    before = jax.tree.map(np.array, own)
    averaged = dp.average(own)
    assert_close(averaged, jax.tree.map(lambda p: p * (size + 1) / 2, params))
    assert kinds(averaged) == {"device"}
    assert reduced_in == {"pinned_host"}
    offloaded = jax.device_put(own, jax.memory.Space.Host)
    averaged = dp.average(offloaded)
    assert_close(averaged, jax.tree.map(lambda p: p * (size + 1) / 2, params))
    assert kinds(averaged) == kinds(offloaded) == {"pinned_host"}
    assert_close(own, before)  # what the user gave is not overwritten


@on_every_worker
def test_hooks_and_sparse_leaves_are_not_copied(accelerators, big_world, rank, size):
    params, batches = parameters(), [batch(one, rows=one + 2) for one in range(size)]
    for settings in ({"hook": jd.hooks.average()}, {"sparse": [describe(params)[0].path]}):
        found = DataParallel(**settings).value_and_grad(loss)(params, batches[rank])
        assert_close(found[1], serial(loss, params, batches)[1])


def doubled(tree):
    return jax.tree.map(lambda x: x * 2, tree)


@on_worker0
def test_arguments_and_results_of_calls(accelerators, big_world):
    tree = {"large": jnp.arange(70_000.0), "small": jnp.ones((3, 0)), "none": None, "half": jnp.ones(5, jnp.bfloat16)}
    assert_close(jd.rpc_sync(last(), doubled, args=(tree,)), doubled(tree))
    with jd.context():
        gradient = jax.grad(lambda x: jd.rpc_sync(last(), doubled, args=(x,)).sum())(tree["large"])
    assert_close(gradient, jnp.full(70_000, 2.0))


def test_copies_that_are_made_while_jax_traces_are_no_tracers(accelerators):
    given, found = jnp.arange(3.0), []

    @jax.jit
    def traced(x):
        found.append(pinned.Copies([given]).of(given))
        return x

    traced(given)
    assert_close(found, [given])
    assert kinds(found) == {"pinned_host"}


def test_what_contains_itself(accelerators):
    itself, codec = [jnp.arange(3.0)], PickleCodec()
    itself.append(itself)
    found = codec.decode(codec.encode(itself, snapshot=False))
    assert found[1] is found
    assert_close(found[0], jnp.arange(3.0))
