"""The start of jax.distributed, as far as it is decided by pure functions; jobs/test_devices.py starts it."""

import socket

import pytest

from jdistgrad.errors import WorldError
from jdistgrad.rpc.worlds.jax_processes import Offer, Port, Readiness, address, must_start

READY, STARTED, LATE = (Offer(kind, "node1", "first", 4000 + k) for k, kind in enumerate(Readiness))


def test_when_there_is_something_to_start():
    assert must_start([READY, READY, READY])
    assert not must_start([STARTED, STARTED])
    assert not must_start([LATE])  # one process needs no other


@pytest.mark.parametrize(
    ("offers", "said"),
    [
        ([READY, LATE, LATE], r"ranks \[1, 2\] have opened their devices already"),
        ([READY, STARTED, READY], r"of 3 ranks only \[1\] have started jax\.distributed"),
        ([LATE, STARTED], r"of 2 ranks only \[1\] have started"),
    ],
)
def test_starts_that_cannot_be(offers, said):
    with pytest.raises(WorldError, match=said):
        must_start(offers)


def test_where_the_ranks_meet():
    assert address([READY, READY]) == "127.0.0.1:4000"
    assert address([READY, Offer(Readiness.READY, "node2", "second")]) == "node1:4000"
    assert address([READY, Offer(Readiness.READY, "node1", "another of that name")]) == "node1:4000"
    numbered = Offer(Readiness.READY, "fd00::5", "first", 4000)
    assert address([numbered, Offer(Readiness.READY, "node2", "second")]) == "[fd00::5]:4000"


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
