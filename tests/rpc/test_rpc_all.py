"""One call on several workers: ``rpc_all``."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.worlds import make, needs_pickling, on_worker0, scaled, wait_until_owned, wire_world

import jdistgrad as jd
from jdistgrad.rpc.worker import current_worker

__all__ = ["wire_world"]

pytestmark = pytest.mark.world(1, 3)


def rank_times(x):
    return jd.rank() * x


def fail_on_odd(x):
    if jd.rank() % 2:
        raise KeyError(f"{x} on {jd.rank()}")
    return x


def names():
    return [f"worker{rank}" for rank in range(jd.world_size())]


@on_worker0
def test_results_come_in_the_order_of_the_workers(world):
    size = jd.world_size()
    assert jd.rpc_all(None, rank_times, args=(10,)).result() == [10 * rank for rank in range(size)]
    backwards = [size - 1 - rank for rank in range(size)]
    assert jd.rpc_all(backwards, rank_times, kwargs={"x": 2}).result() == [2 * rank for rank in backwards]
    assert [future.result() for future in jd.rpc_all(names(), rank_times, args=(1,))] == list(range(size))
    assert jd.rpc_all([], rank_times, args=(1,)).result() == []


changed = threading.Event()


def sum_of_doubled(array):
    if jd.rank() == 0:
        changed.wait()
    array *= 2
    return float(array.sum())


@pytest.mark.parametrize("length", [3, 100_000])
@on_worker0
def test_every_call_has_arrays_of_its_own_also_on_the_caller(world, length):
    changed.clear()
    array, workers = np.ones(length), [0, *range(jd.world_size())]
    futures = jd.rpc_all(workers, sum_of_doubled, args=(array,))
    array[:] = 5
    changed.set()
    assert futures.result() == [2 * length for _ in workers]
    np.testing.assert_array_equal(array, 5)


@on_worker0
def test_failures_come_together_and_name_the_workers(big_world):
    futures = jd.rpc_all([0, 1, 2, 1], fail_on_odd, args=(5,))
    with pytest.raises(ExceptionGroup) as caught:
        futures.result()
    assert [type(error) for error in caught.value.exceptions] == [KeyError, KeyError]
    for error in caught.value.exceptions:
        assert "On worker1 (rank 1)" in error.__notes__[0]
    assert futures[2].result() == 5


@on_worker0
def test_each_worker_gets_its_own_share_of_a_reference(big_world):
    made = jd.remote(1, make, args=(4,))
    for results in (jd.rpc_all(None, jnp.sum, args=(made,)), jd.rpc_all(None, keep, args=(jd.by_reference(made),))):
        assert [float(one) for one in results.result()] == [6, 6, 6]
    del made, results
    wait_until_owned(1, 0)


def keep(reference):
    return reference.to_here().sum()


@on_worker0
def test_nothing_is_sent_if_the_call_cannot_be(world):
    with pytest.raises(jd.UnknownWorkerError):
        jd.rpc_all([0, "nobody"], rank_times, args=(1,))
    for several in (lambda: jd.rpc_all("worker1", rank_times, args=(1,)), lambda: jd.map(len, [[]], workers="worker1")):
        with pytest.raises(TypeError, match=r"\['worker1'\]"):
            several()
    with pytest.raises(jd.FunctionError):
        jd.rpc_all([0], 3)
    assert len(current_worker().calls.pending) == 0


@needs_pickling
@on_worker0
def test_arguments_are_encoded_once(wire_world, monkeypatch):
    encode, encoded = current_worker().codec.encode, []
    monkeypatch.setattr(
        current_worker().codec, "encode", lambda value, **how: encoded.append(value) or encode(value, **how)
    )
    calls = [jd.world_size() - 1] * 7
    assert jd.rpc_all(calls, rank_times, args=(1,)).result() == calls
    assert len(encoded) == 1
    with pytest.raises(jd.EncodingError):
        jd.rpc_all([1, 0], rank_times, args=(threading.Lock(),))
    assert len(current_worker().calls.pending) == 0


@on_worker0
def test_gradients_go_through_all(world):
    params = {"w": jnp.arange(1.0, 4.0), "n": 2}

    def loss(w, x):
        return sum(jnp.sum(one**2) for one in jd.rpc_all(None, scaled, args=({**params, "w": w}, x)).result())

    x = jnp.array([0.5, -1.0, 2.0])
    with jd.context():
        found = jax.grad(loss, argnums=(0, 1))(params["w"], x)
    serial = jax.grad(lambda w, x: jd.world_size() * jnp.sum((w * x + 2) ** 2), argnums=(0, 1))(params["w"], x)
    assert_close(found, serial)
