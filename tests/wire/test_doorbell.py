"""Doorbells: who sleeps is woken, no ring is needed, and one look finds what it was rung for."""

import socket
import threading

import pytest

from jdistgrad.wire import doorbell as doorbells, frames, launcher_env
from jdistgrad.wire.doorbell import Doorbell
from jdistgrad.wire.message import Kind

FOR_EVER = 3600.0  # of a sleep that only a ring ends; the guard of the tests ends it otherwise


@pytest.fixture
def bells():
    made = [Doorbell() for _ in range(3)]
    for one in made:
        one.meet([bell.address for bell in made])
    yield made
    for one in made:
        one.close()


def is_silent(bell):
    try:
        bell._socket.recv(1)
    except BlockingIOError:
        return True
    return False


def test_a_ring_ends_a_sleep(bells):
    awake = threading.Event()
    sleeper = threading.Thread(target=lambda: (bells[2].sleep(FOR_EVER), awake.set()), daemon=True)
    sleeper.start()
    bells[0].ring(2)
    assert awake.wait(60)


def test_a_ring_before_the_sleep_counts(bells):
    bells[1].ring(0)
    bells[0].sleep(FOR_EVER)


def test_many_rings_are_one(bells):
    for _ in range(10_000):
        bells[0].ring(1)
    bells[1].sleep(FOR_EVER)
    assert is_silent(bells[1])


def test_nobody_hears_the_ring_of_another(bells):
    bells[0].ring(1)
    assert is_silent(bells[0])
    assert is_silent(bells[2])


def test_who_has_left_is_not_rung_any_more(bells):
    assert bells[0].all_ring
    bells[1].close()
    for rank in (1, 1, 2):
        bells[0].ring(rank)
    bells[2].sleep(FOR_EVER)
    assert not bells[0].all_ring


def test_without_those_who_are_lost_all_ring(bells):
    bells[1].close()
    bells[0].lose(1)
    bells[0].ring(1)
    assert bells[0].all_ring
    bells[2].ring(1)
    assert not bells[2].all_ring
    bells[2].lose(1)
    assert bells[2].all_ring


def test_who_cannot_be_reached_is_known_at_once():
    bell = Doorbell()
    bell.meet([bell.address, "a rank of another machine", ""])
    assert not bell.all_ring
    for rank in range(3):
        bell.ring(rank)
    bell.sleep(FOR_EVER)
    bell.close()


def test_one_that_does_not_come_keeps_nobody_from_being_rung(monkeypatch):
    """Linux counts what has not been read against the sender; hosts that let many rings queue come to that limit."""

    def with_little_room():
        made = new_socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return made

    new_socket = doorbells._new_socket
    monkeypatch.setattr(doorbells, "_new_socket", with_little_room)
    made = [Doorbell() for _ in range(3)]
    made[0].meet([one.address for one in made])
    for _ in range(100):
        made[0].ring(1)
    made[0].ring(2)
    made[2].sleep(FOR_EVER)
    for one in made:
        one.close()


def test_a_closed_bell_sleeps_by_the_clock(bells):
    bells[0].close()
    bells[0].sleep(0.001)
    bells[0].ring(1)
    assert not bells[0].all_ring
    assert is_silent(bells[1])


def test_without_sockets_sleeps_go_by_the_clock(bells, monkeypatch):
    monkeypatch.setattr(doorbells, "HIGHEST_DESCRIPTOR", -1)
    silent = Doorbell()
    assert not silent.address
    silent.meet([bell.address for bell in bells])
    silent.ring(0)
    silent.sleep(0.001)
    assert not silent.all_ring


class Received(list):
    """A receiver that keeps the messages."""

    def receive(self, message):
        self.append(message)


@pytest.mark.every_rank
@pytest.mark.skipif(not launcher_env.launched(), reason="needs ranks: every run under mpirun has it")
def test_the_first_look_after_the_ring_finds_the_message():
    from mpi4py import MPI

    from jdistgrad.wire.mpi import MPITransport

    comm, bell, received = MPI.COMM_WORLD.Dup(), Doorbell(), Received()
    bell.meet(comm.allgather(bell.address))
    transport = MPITransport(comm, "test", bell)
    transport._receiver = received
    frame, _ = frames.pack(Kind.PING, comm.rank, 0, None)
    sent = comm.Isend([frame, MPI.BYTE], (comm.rank + 1) % comm.size, 0)
    bell.ring((comm.rank + 1) % comm.size)
    bell.sleep(FOR_EVER)
    transport._look()
    assert [(one.kind, one.id) for one in received] == [(Kind.PING, (comm.rank - 1) % comm.size)]
    sent.Wait()
    comm.Barrier()
    bell.close()
    comm.Free()
