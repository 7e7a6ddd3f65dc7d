"""Doorbells: who sleeps is woken, no ring is needed, and one look finds what it was rung for."""

import contextlib
import ctypes
import os
import socket
import threading
import types

import pytest

from jdistgrad.wire import doorbell as doorbells, launcher_env
from jdistgrad.wire.doorbell import AWAKE, BELLS, SERVES, WAITS, Doorbell
from jdistgrad.wire.memory import NBYTES, SharedMemory
from jdistgrad.wire.message import Message, MessageType, Parcel

FOR_EVER = 3600.0  # of a sleep that only a ring ends; the guard of the tests ends it otherwise


@contextlib.contextmanager
def doorbells_of(count, *addresses):
    """Yield so many doorbells that have met, and have met these addresses; they are closed with their memory."""
    with contextlib.ExitStack() as until_done:
        memories = [SharedMemory() for _ in range(count)]
        made = [Doorbell(memory) for memory in memories]
        for memory, bell in zip(memories, made, strict=True):
            until_done.callback(memory.close)
            until_done.callback(bell.close)
        for rank, (memory, bell) in enumerate(zip(memories, made, strict=True)):
            memory.meet([*[one.address for one in memories], *addresses], rank)
            bell.meet([*[one.address for one in made], *addresses])
        yield made


@pytest.fixture
def bells():
    with doorbells_of(3) as made:
        yield made


def is_silent(bell, which=WAITS):
    try:
        bell._own[which].recv(1)
    except BlockingIOError:
        return True
    return False


def sleeps(bell, unless=lambda: False, which=WAITS):
    """Sleep as a thread does that waits for an answer."""
    bell.show(which)
    bell.sleep(which, FOR_EVER, unless)
    bell.show(AWAKE)


def ring_all(bell, ranks):
    for rank in ranks:
        bell.ring(rank)


def asleep(bell, which=WAITS):
    """Let a thread sleep; return an event that is set when it is up. It sleeps, or has not looked yet."""
    looked, awake = threading.Event(), threading.Event()

    def last_look():
        looked.set()
        return False

    threading.Thread(target=lambda: (sleeps(bell, last_look, which), awake.set()), daemon=True).start()
    assert looked.wait(60)
    return awake


@pytest.mark.parametrize("which", BELLS)
def test_a_ring_ends_a_sleep_and_is_for_sleepers_alone(bells, which):
    awake = asleep(bells[2], which)
    bells[0].ring(2)
    assert awake.wait(60)
    bells[0].show(AWAKE)
    bells[1].ring(0)
    assert is_silent(bells[0], which)


def test_only_the_bell_that_is_shown_rings(bells):
    serving, waiting = asleep(bells[2], SERVES), asleep(bells[2], WAITS)
    bells[2].show(WAITS)
    bells[0].ring(2)
    assert waiting.wait(60)
    assert not serving.is_set()
    bells[2].show(SERVES)
    bells[2].ring_own(WAITS | SERVES)
    assert serving.wait(60)


@pytest.mark.parametrize(("where", "missing"), [(ctypes, "CDLL"), (os, "ftruncate"), (os, "readlink")])
def test_who_cannot_show_whether_it_sleeps_is_rung_every_time(monkeypatch, where, missing):
    def fails(*arguments):
        raise OSError(f"no {missing} here")

    monkeypatch.setattr(where, missing, fails)
    with doorbells_of(2) as (ringing, rung):
        ringing.ring(1)
        assert not is_silent(rung)


def test_a_python_built_for_old_systems_shows_whether_it_sleeps(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with doorbells_of(2) as (ringing, rung):
        rung.show(AWAKE)
        ringing.ring(1)
        assert is_silent(rung)
        sleeps(rung, lambda: ringing.ring(1))


def test_a_ring_after_the_last_look_counts(bells):
    sleeps(bells[0], lambda: bells[1].ring(0))


def test_what_came_before_anybody_could_see_the_sleep_ends_it(bells):
    sleeps(bells[0], lambda: True)
    bells[1].ring(0)
    assert is_silent(bells[0])


def test_who_has_left_is_not_rung_any_more_and_without_who_is_lost_all_ring(bells):
    assert bells[0].all_ring
    bells[1].close()
    sleeps(bells[2], lambda: ring_all(bells[0], (1, 1, 2)))
    assert not bells[0].all_ring
    bells[0].lose(1)
    bells[0].ring(1)
    assert bells[0].all_ring


def test_who_has_left_or_is_lost_leaves_no_files(bells):
    before = len(os.listdir("/proc/self/fd"))
    with doorbells_of(2) as kept:
        pass
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(kept) == 2
    bells[0].lose(2)
    bells[0]._memory.lose(2)
    bells[0].ring(2)
    assert (
        len(os.listdir("/proc/self/fd")) == before - 3
    )  # two sockets, and the memory that shows which bell is to be rung


def test_who_cannot_be_reached_is_known_at_once():
    with doorbells_of(1, "a rank of another machine", "") as (bell,):
        assert not bell.all_ring
        sleeps(bell, lambda: ring_all(bell, range(3)))


def test_one_that_does_not_come_keeps_nobody_from_being_rung(monkeypatch):
    """Linux counts what has not been read against the sender; hosts that let many rings queue come to that limit."""

    class WithLittleRoom(socket.socket):
        def __init__(self, *kind):
            super().__init__(*kind)
            self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

    monkeypatch.setattr(socket, "socket", WithLittleRoom)
    with doorbells_of(3) as made:
        made[1].show(WAITS)
        ring_all(made[0], [1] * 100)
        sleeps(made[2], lambda: made[0].ring(2))


def test_without_sockets_sleeps_go_by_the_clock(bells, monkeypatch):
    monkeypatch.setattr(doorbells, "HIGHEST_DESCRIPTOR", -1)
    silent = Doorbell(bells[0]._memory)
    assert not silent.address
    silent.meet([silent.address, *[bell.address for bell in bells[1:]]])
    silent.ring(1)
    silent.sleep(WAITS, 0.001)
    assert not silent.all_ring


class Received(list):
    """A receiver that keeps the messages."""

    def receive(self, message):
        self.append(message)


@contextlib.contextmanager
def transport_of_all_ranks():
    """Yield a transport of all ranks, which nobody looks for by itself, and what it receives."""
    from mpi4py import MPI

    from jdistgrad.wire.mpi_transport import MPITransport

    comm, memory, received = MPI.COMM_WORLD.Dup(), SharedMemory(), Received()
    bell = Doorbell(memory)
    memory.meet(comm.allgather(memory.address), comm.rank)
    bell.meet(comm.allgather(bell.address))
    transport = MPITransport(comm, memory, bell)
    transport._receiver, transport._progress = received, types.SimpleNamespace()
    comm.Barrier()  # all have met, so each one's memory is known to be within reach
    yield transport, comm, received
    comm.Barrier()
    bell.close()
    memory.close()
    comm.Free()


def sleep(transport):
    sleeps(transport._doorbell, transport._something_came)


@pytest.mark.every_rank
@pytest.mark.skipif(not launcher_env.launched(), reason="needs ranks: every run under mpirun has it")
def test_nobody_sleeps_who_has_not_looked_for_the_end_of_what_is_being_sent():
    larger = memoryview(bytes(NBYTES))  # than what ranks share, so that MPI sends it
    with transport_of_all_ranks() as (transport, comm, received):
        if comm.rank == 0 and comm.size > 1:
            transport.send(1, Message(MessageType.PUSH, 0, 7, Parcel(memoryview(b""), [larger])))
            sleep(transport)
        comm.Barrier()
        while transport._outgoing or (comm.rank == 1 and not received):
            transport._look()
