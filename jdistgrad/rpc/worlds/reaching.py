"""By which name or address the processes of a job reach rank 0, found by trial.

A node's own name may be unknown to other nodes (in pods of Kubernetes, for example), or known to the node itself as a
loopback address. jax.distributed ends a process that does not find rank 0, without a word on why.
"""

import contextlib
import fcntl
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence

from jdistgrad.config import settings
from jdistgrad.errors import WorldError

TRIAL_SECONDS = 3.0
SIOCGIFADDR = 0x8915  # Linux's request for the address of a network interface

Trial = tuple[int, str]  # a port, and what is read there


def hosts() -> list[str]:
    """Return the names and addresses by which other nodes may reach this one, the likeliest first."""
    return [settings.host] if settings.host else [socket.gethostname(), *addresses()]


def addresses() -> list[str]:
    """Return the IPv4 addresses of this machine's network interfaces but the loopback, where the system tells."""
    found = list[str]()
    if sys.platform != "linux":
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [one for one in found if not is_loopback(one)]


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


class Door:
    """A port of this process at which those who reach it read what nobody else knows."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self.trial: Trial = (self._socket.getsockname()[1], secrets.token_hex(8))
        threading.Thread(target=self._answer, name="jdistgrad-door", daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                visitor, _ = self._socket.accept()
            except OSError:  # closed
                return
            with visitor, contextlib.suppress(OSError):
                visitor.sendall(self.trial[1].encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait for visitors
        self._socket.close()


def reaches(host: str, trial: Trial) -> bool:
    """Return whether this process reaches the one that made a trial, by a name or address."""
    port, expected = trial
    try:
        with socket.create_connection((host, port), TRIAL_SECONDS) as visit, visit.makefile("rb") as answer:
            return answer.read(len(expected)) == expected.encode()
    except (OSError, UnicodeError):
        return False


def reached_by_all(offered: Sequence[str], trial: Trial, gather: Callable[[bool], list[bool]]) -> str:
    """Return the first name or address by which all ranks reach rank 0. Every rank must call it.

    Arguments:
      offered: the names and addresses of rank 0.
      gather: exchanges a value among the ranks.

    Raises:
      WorldError: there is none; raised on every rank.
    """
    missed = list[str]()
    for host in offered:
        found = gather(reaches(host, trial))
        if all(found):
            return host
        missed.append(f"{host} (not by ranks {[rank for rank, one in enumerate(found) if not one]})")
    raise WorldError(
        f"init(devices=True): rank 0 is not reached by {', nor by '.join(missed)}. Set JDISTGRAD_HOST for rank 0 to a "
        "name or an address by which all nodes reach it; see whether a firewall closes the ports between them."
    )
