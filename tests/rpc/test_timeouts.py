"""Timeouts of calls, worlds and references: the contents of the error, and calls that go on after it."""

import math

import pytest
from helpers.worlds import last, nap, on_worker0, still_works

import jdistgrad as jd


@on_worker0
def test_a_timeout_names_call_worker_and_seconds(world):
    with pytest.raises(jd.CallTimeoutError) as caught:
        jd.rpc_sync(last(), nap, args=(0.3,), timeout=0.1)
    assert caught.value.seconds == 0.1
    assert caught.value.worker.rank == last()
    assert isinstance(caught.value, TimeoutError)
    future = jd.rpc_async(last(), nap, args=(0.3,), timeout=0.1)
    assert isinstance(future.exception(5), jd.CallTimeoutError)
    assert jd.rpc_sync(last(), nap, args=(0.3,), timeout=math.inf) == 0.3


@on_worker0(timeout=0.2)
def test_the_worlds_timeout_is_the_default(world):
    with pytest.raises(jd.CallTimeoutError):
        jd.rpc_sync(last(), nap, args=(0.5,))
    assert jd.rpc_sync(last(), nap, args=(0.3,), timeout=5) == 0.3


def nap_elsewhere(limit):
    return jd.rpc_async(0, nap, args=(0.1,)).result(limit)


@pytest.mark.parametrize("limit", [math.inf, 1e10])  # locks take 9.2e9 seconds at most
def test_a_world_without_a_limit(world, limit):
    world.drive(lambda: jd.rpc_sync(last(), nap_elsewhere, args=(limit,)), timeout=limit)


@pytest.mark.parametrize("timeout", [0, -1, math.nan, "5", True])
@on_worker0
def test_timeouts_that_are_none(world, timeout):
    with pytest.raises(ValueError, match="timeout"):
        jd.rpc_sync(0, nap, args=(0,), timeout=timeout)


@on_worker0
def test_a_cancelled_call_is_forgotten(world):
    assert jd.rpc_async(last(), nap, args=(0.1,)).cancel()
    still_works()


@on_worker0(timeout=1.0)  # of init too, which takes long on a busy machine
def test_a_slow_reference_may_take_as_long_as_the_call(world):
    rref = jd.remote(last(), nap, args=(1.5,), timeout=5)
    assert jd.rpc_sync(0, abs, args=(rref,), timeout=10) == 1.5


@on_worker0
def test_the_timeout_of_remote_is_that_of_its_creation(world):
    rref = jd.remote(last(), nap, args=(0.4,), timeout=0.1)
    for wait in (rref.creation().result, lambda: rref.to_here(timeout=0.05)):
        with pytest.raises(jd.CallTimeoutError):
            wait()
    assert rref.to_here() == 0.4
