"""The start of jax.distributed, as far as it is decided by pure functions; jobs/test_devices.py starts it."""

import socket

import pytest

from jdistgrad.errors import WorldError
from jdistgrad.rpc import jax_processes
from jdistgrad.rpc.jax_processes import Offer, Port, address, must_start, offer

KINDS = jax_processes.READY, jax_processes.STARTED, jax_processes.LATE
READY, STARTED, LATE = (Offer(kind, ("node1",), 4000 + k) for k, kind in enumerate(KINDS))


def test_when_there_is_something_to_start():
    assert must_start([READY, READY, READY])
    assert not must_start([STARTED, STARTED])
    assert not must_start([LATE])  # one process needs no other
    for offers, said in (
        ([READY, LATE, LATE], "ranks [1, 2] have opened their devices already"),
        ([READY, STARTED, READY], "of 3 ranks only [1] have started jax.distributed"),
        ([LATE, STARTED], "of 2 ranks only [1] have started"),
    ):
        with pytest.raises(WorldError) as caught:
            must_start(offers)
        assert said in str(caught.value)


def test_ranks_of_one_machine_meet_at_its_loopback_address():
    port = Port()
    first = offer(port)
    assert address([first, READY], gather=lambda found: [found, found]) == f"127.0.0.1:{port.number}"
    port.close()


def test_ranks_of_several_machines_meet_where_all_reach_the_first():
    port, other = Port(), Offer(jax_processes.READY)
    first = Offer(jax_processes.READY, ("unknown.invalid", "localhost", "127.0.0.1", "::1"), 4000, port.trial)
    said = []

    def gather(found):  # two other ranks, one of which does not know rank 0's machine as localhost
        said.append(found)
        return [found, found, found and len(said) != 2]

    assert address([first, other, other], gather) == "127.0.0.1:4000"
    assert said == [False, True, True]
    numbered = Offer(jax_processes.READY, ("::1",), 4000, port.trial)
    assert address([numbered, other], lambda _: [True, True]) == "[::1]:4000"
    port.close()


def test_ranks_that_reach_the_first_by_no_name_say_so():
    port, closed = Port(), Port()
    closed.close()
    trials = [(port.trial[0], "another process"), closed.trial]  # who is there is not rank 0, or nobody is
    for trial in trials:
        first = Offer(jax_processes.READY, ("localhost", "127.0.0.1"), 4000, trial)
        with pytest.raises(
            WorldError, match=r"by localhost \(not by ranks \[1\]\), nor by 127\.0\.0\.1 .*JDISTGRAD_HOST"
        ):
            address([first, Offer(jax_processes.READY)], lambda found: [True, found])
    port.close()


def test_a_port_that_nobody_else_gets():
    first, second = Port(), Port()
    assert first.number != second.number
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", first.number))
    with socket.socket() as coordinator:
        coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        coordinator.bind(("127.0.0.1", first.number))
    for port in (first, second):
        port.close()
