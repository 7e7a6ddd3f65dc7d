"""Lifetimes of values on their owners: nothing is freed too early, and nothing is left behind."""

import contextlib
import time

import jax.numpy as jnp
import pytest
from helpers.programs import identity
from helpers.worlds import last, make, on_worker0, wait_until_owned

import jdistgrad as jd
from jdistgrad.rpc.references import value_of
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire import launcher_env
from jdistgrad.wire.message import MessageType


@on_worker0
def test_dropped_references_free_the_value(world):
    rref = jd.remote(last(), make, args=(3,))
    copies = [pass_on_reference(rref, rank) for rank in range(jd.world_size())]
    wait_until_owned(last(), 1)
    del rref
    wait_until_owned(last(), 1)
    del copies
    wait_until_owned(last(), 0)


def pass_on_reference(rref, rank):
    return jd.rpc_sync(rank, identity, args=(jd.by_reference(rref),))


@on_worker0
def test_a_reference_nobody_keeps_is_free_at_once(world):
    for _ in range(20):
        jd.remote(last(), make, args=(3,))
    cycle = {"rref": jd.remote(last(), make, args=(3,))}
    cycle["self"] = cycle
    del cycle
    wait_until_owned(last(), 0)


@on_worker0
def test_a_failed_encoding_costs_no_weight(world):
    rref = jd.remote(last(), make, args=(3,))
    for _ in range(5):
        with pytest.raises((jd.EncodingError, TypeError)):
            jd.rpc_sync(last(), never_called, args=(jd.by_reference(rref), [rref, unsendable()]))
    del rref
    wait_until_owned(last(), 0)


def never_called(reference, pair):
    raise TypeError("a local world hands objects over unpickled, so this call arrives")


def unsendable():
    return (k for k in range(3))


@on_worker0
def test_a_fetch_that_comes_after_the_last_drop_does_not_keep_the_world_open(world):
    rref = jd.remote(last(), make, args=(3,))
    identifier = rref.id
    del rref
    wait_until_owned(last(), 0)
    with pytest.raises(jd.StaleReferenceError):
        jd.rpc_sync(last(), value_of, args=(identifier,), timeout=5)


@on_worker0
def test_a_value_lives_until_the_wait_for_its_creation_is_served(world):
    rref = jd.remote(last(), make, args=(3,))
    with calls_held_back():
        made = rref.creation(timeout=20)
        del rref
        current_worker().releasing.tick()
    assert made.result() is None
    wait_until_owned(last(), 0)


@contextlib.contextmanager
def calls_held_back():
    """Send the calls that this worker makes in the block when it ends."""
    transport, held = current_worker().transport, []
    genuine = transport.send

    def send(peer, message):
        held.append((peer, message)) if message.kind is MessageType.CALL else genuine(peer, message)

    transport.send = send
    try:
        yield
    finally:
        transport.send = genuine
        for one in held:
            genuine(*one)


@on_worker0
def test_late_answers_still_return_their_references(world):
    with pytest.raises(jd.CallTimeoutError):
        jd.rpc_sync(last(), slow_reference, args=(0.2,), timeout=0.05)
    time.sleep(0.4)
    wait_until_owned(last(), 0)


def slow_reference(seconds):
    time.sleep(seconds)
    return jd.RRef(jnp.ones(3))


def test_a_call_that_cannot_be_read_still_returns_its_references(world):
    from jdistgrad.rpc import functions

    def gone(reference):
        return reference

    def body():
        rref = jd.remote(last(), make, args=(3,))
        if last() != 0 and launcher_env.launched():
            with pytest.raises(jd.FunctionError):
                jd.rpc_sync(last(), gone, args=(jd.by_reference(rref),))
        del rref
        wait_until_owned(last(), 0)

    def main():
        me = jd.init()
        if me.rank == 0:
            functions.register(gone, "gone")
            body()
        assert jd.shutdown() == []

    world.run(main)


def test_what_is_left_is_told_at_shutdown_and_refused_in_the_next_world(world):
    def main():
        jd.init()
        kept = jd.RRef(5)
        left = jd.shutdown()
        assert any("still owns" in line for line in left)
        assert any("still holds a reference" in line for line in left)
        jd.init()
        with pytest.raises(jd.StaleReferenceError):
            kept.to_here()
        with pytest.raises(jd.StaleReferenceError):
            jd.rpc_sync(last(), identity, args=(jd.by_reference(kept),))
        assert jd.shutdown() == []
        return kept

    kept = world.run(main)[0]
    with pytest.raises(jd.StaleReferenceError):
        kept.to_here()
