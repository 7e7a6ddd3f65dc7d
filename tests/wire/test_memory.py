"""Memory of large pieces: found where they were put, kept while any array uses it, and no longer."""

import contextlib
import gc
import operator
import os
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.worlds import last, needs_pickling, on_worker0, wait_until_owned, wire_world as wire_world
from hypothesis import given, strategies as st

import jdistgrad as jd
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.memory import GRAIN, GRAINS, NBYTES, BufferPool, SharedMemory, size_class

LARGE = 3 * GRAIN + 5


@pytest.fixture
def ranks():
    """Yield the shared memories of three ranks that know each other's."""
    memories = [SharedMemory() for _ in range(3)]
    for rank, one in enumerate(memories):
        one.meet([*[memory.address for memory in memories], "a rank of another machine"], rank)
    yield memories
    for one in memories:
        one.close()


def piece_of(value, nbytes=LARGE):
    return np.full(nbytes, value, np.uint8).data


def leave_room(memory, grains):
    memory._used[1 + grains :] = b"\1" * (GRAINS - 1 - grains)


def send(ranks, sender, receiver, value, nbytes=LARGE):
    """Return the place of a piece, and the piece as the receiver finds it."""
    place = ranks[sender].put(receiver, piece_of(value, nbytes))
    return place, ranks[receiver].found(sender, place, nbytes) if place else None


@given(st.lists(st.integers(1, 12), max_size=20), st.randoms(use_true_random=False))
def test_pieces_take_the_first_room_and_never_overlap(lengths, chance):
    with contextlib.closing(SharedMemory()) as memory:
        memory.meet([memory.address], 0)
        leave_room(memory, 39)
        taken = {}
        for length in lengths:
            used = {k for place, (count, _) in taken.items() for k in range(place, place + count)}
            fits = (k for k in range(1, 41 - length) if used.isdisjoint(range(k, k + length)))
            place = memory.put(0, piece_of(1, length * GRAIN))
            assert place == next(fits, 0)
            if place:
                taken[place] = length, memory.found(0, place, length * GRAIN)
            if taken and chance.random() < 0.4:
                del taken[chance.choice(sorted(taken))]


def test_each_rank_finds_what_the_others_have_put(ranks):
    pairs = [(sender, receiver) for sender in range(3) for receiver in range(3) if sender != receiver]
    found = {pair: send(ranks, *pair, 10 * pair[0] + pair[1], LARGE + pair[0])[1] for pair in pairs}
    for (sender, receiver), piece in found.items():
        assert piece.shape == (LARGE + sender,)
        assert (piece == 10 * sender + receiver).all()


def test_a_place_is_used_again_when_the_last_view_is_gone_and_not_earlier(ranks):
    place, piece = send(ranks, 0, 1, 7)
    view = memoryview(piece[8:24].view(np.float32).reshape(2, 2))
    del piece
    other, _ = send(ranks, 0, 2, 8)
    assert other != place
    assert bytes(view) == b"\7" * 16
    del view
    again, piece = send(ranks, 0, 1, 9)
    later, _ = send(ranks, 0, 1, 10)
    assert again == place != later
    assert (piece == 9).all()


def test_an_array_of_jax_keeps_its_place(ranks):
    place, piece = send(ranks, 0, 1, 7, 4 * GRAIN)
    array = jax.device_put(piece.view(np.float32))
    assert array.unsafe_buffer_pointer() == piece.ctypes.data
    del piece
    assert send(ranks, 0, 2, 8)[0] != place
    assert (np.asarray(array).view(np.uint8) == 7).all()
    del array
    gc.collect()  # JAX releases host memory at the next call of JAX, or in a garbage collection
    jnp.zeros(3).block_until_ready()
    assert send(ranks, 0, 1, 9)[0] == place


def test_what_has_no_room_is_not_put(ranks):
    leave_room(ranks[0], 9)
    held = [send(ranks, 0, 1, k, 4 * GRAIN)[1] for k in range(2)]
    assert ranks[0].put(2, piece_of(9, 2 * GRAIN)) == 0
    assert (held[0] == 0).all()
    assert (held[1] == 1).all()
    held.clear()
    assert ranks[0].put(2, piece_of(9, 9 * GRAIN)) == 1
    assert ranks[0].put(2, piece_of(9, GRAIN)) == 0


def test_nothing_is_put_for_a_rank_that_cannot_find_it(ranks):
    assert ranks[0].put(3, piece_of(1)) == 0
    with contextlib.closing(SharedMemory()) as memory:
        memory.meet([memory.address], 0)
        assert memory.put(1, piece_of(1)) == 0
    assert memory.put(0, piece_of(1)) == 0


def test_closed_memory_is_given_back_whoever_keeps_what_used_it(ranks):
    send(ranks, 0, 1, 7)
    kept = [weakref.ref(memory) for one in ranks for memory in (one.own, *one.others) if memory]
    for one in ranks:
        one.close()
    assert [memory() for memory in kept] == [None] * 12


def pages(file):
    """Return how many bytes of a rank's memory have been written to, and not been given back."""
    return os.fstat(file).st_blocks * 512


def test_closed_memory_keeps_only_what_is_in_use(ranks):
    held = [send(ranks, 0, 1, k, nbytes)[1] for k, nbytes in enumerate((LARGE, 100 * GRAIN, LARGE))]
    send(ranks, 0, 2, 3, 100 * GRAIN)
    memory = os.dup(ranks[0]._file)
    held[1] = None
    assert pages(memory) > 200 * GRAIN
    for one in ranks:
        one.close()
    assert LARGE * 2 < pages(memory) <= 9 * GRAIN
    assert (held[0] == 0).all()
    assert (held[2] == 2).all()
    held[0] = None
    assert LARGE < pages(memory) <= 5 * GRAIN
    assert (held[2] == 2).all()
    held[2][:] = 1
    os.close(memory)


def places_taken():
    return len(current_worker().transport._memory._grains)


@needs_pickling
@on_worker0
def test_large_arrays_of_messages_lie_in_shared_memory_as_long_as_they_are_used(wire_world):
    x, before = jnp.arange(LARGE, dtype=jnp.float32), places_taken()
    y = jd.remote(last(), operator.pos, args=(x,))
    assert (y.to_here() == x).all()
    assert places_taken() == before + 1
    del y
    wait_until_owned(last(), 0)
    jd.rpc_sync(last(), operator.neg, args=(x,))
    jd.rpc_sync(last(), len, args=(b"",))
    assert places_taken() <= before + 1


@needs_pickling
@on_worker0
def test_one_message_may_hold_pieces_of_both_kinds(wire_world):
    larger, large = np.arange(NBYTES // 8, dtype=np.int64), np.arange(LARGE)
    found = jd.rpc_sync(last(), list, args=((large, larger, "small", large + 1),))
    assert [one if isinstance(one, str) else one.tobytes() for one in found] == [
        large.tobytes(),
        larger.tobytes(),
        "small",
        (large + 1).tobytes(),
    ]


def idle(pool):
    pool._take_back()
    return sum(len(block) for blocks in pool._idle.values() for block in blocks)


def test_a_view_keeps_its_block_which_is_then_used_again():
    pool = BufferPool()
    lease = pool.lease(100_000)
    view = lease.view(np.float32)[10:20].reshape(2, 5)
    view[:] = 7
    address = lease.ctypes.data
    del lease
    other = pool.lease(100_000)
    assert other.ctypes.data != address
    other[:] = 0
    assert (view == 7).all()
    del view
    assert pool.lease(100_000).ctypes.data == address


def test_a_jax_array_that_aliases_keeps_its_block():
    pool = BufferPool()
    lease = pool.lease(400_000)
    lease.view(np.float32)[:] = 3
    array = jax.device_put(lease.view(np.float32))
    assert array.unsafe_buffer_pointer() == lease.ctypes.data
    del lease
    for _ in range(3):
        pool.lease(400_000)[:] = 0
    assert (np.asarray(array) == 3).all()
    del array
    gc.collect()  # JAX releases host memory at the next call of JAX, or in a garbage collection
    assert idle(pool) == 2 * size_class(400_000)


def test_no_more_than_the_limit_stays_warm():
    pool = BufferPool(idle_limit=300_000)
    leases = [pool.lease(100_000) for _ in range(5)]
    del leases
    assert 0 < idle(pool) <= 300_000


@given(st.integers(1, 1 << 40))
def test_size_classes_waste_little(nbytes):
    assert nbytes <= size_class(nbytes) <= max(nbytes * 1.15, nbytes + (1 << 16))
