"""The start of jax.distributed by the ranks of an MPI job, so that XLA's collectives span the ranks' devices.

JAX's own detection of MPI jobs takes a port from a hash of the host's name, and never asks whether that port is free.
Here rank 0 binds a port, and sends its number over MPI.

By which name or address the others reach rank 0 is found by trial. A node's own name may be unknown to other nodes (in
pods of Kubernetes, for example), or known to the node itself as a loopback address. jax.distributed ends a process that
does not find rank 0, without a word on why.
"""

import contextlib
import dataclasses
import fcntl
import math
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdistgrad._compat import backends_are_initialized
from jdistgrad.config import settings
from jdistgrad.errors import WorldError

NO_PROXY = "no_grpc_proxy"
TRIAL_SECONDS = 3.0
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # Linux's request for the address of a network interface

# Whether jax.distributed can be started in a process.
READY, STARTED, LATE = "ready", "has started jax.distributed", "has opened its devices"

Trial = tuple[int, str]  # a port, and what is read there


@dataclasses.dataclass(frozen=True)
class Offer:
    """A rank's part of the start, in strings and numbers.

    Attributes:
      readiness: READY, STARTED or LATE.
      hosts: the names and addresses by which others may reach rank 0, the likeliest first. By the first one they do
        if all are on one machine, and in one container: the answer to the trial is of rank 0.
      port: rank 0's, which it has bound.
      trial: where the ranks see whether they reach rank 0.
    """

    readiness: str
    hosts: tuple[str, ...] = ()
    port: int = 0
    trial: Trial = (0, "")


class Port:
    """A port that this process holds until ``close``; meanwhile it may be bound here once more.

    Attributes:
      trial: another port of this process, at which clients read a secret.
    """

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does, which binds it after us
        if dual:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind(("::" if dual else "0.0.0.0", 0))
        self.number: int = self._socket.getsockname()[1]
        self._door = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self.trial: Trial = (self._door.getsockname()[1], secrets.token_hex(8))
        threading.Thread(target=self._answer, name="jdistgrad-door", daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                visitor, _ = self._door.accept()
            except OSError:  # closed
                return
            with visitor, contextlib.suppress(OSError):
                visitor.sendall(self.trial[1].encode())

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # ends the wait for visitors
        self._door.close()


def offer(port: Port | None) -> Offer:
    """Return this rank's part of the start. ``port``: rank 0's."""
    late = LATE if backends_are_initialized() else READY
    readiness = STARTED if jax.distributed.is_initialized() else late
    if port is None:
        return Offer(readiness)
    hosts = (settings.host,) if settings.host else (socket.gethostname(), *addresses())
    return Offer(readiness, (LOOPBACK, *hosts), port.number, port.trial)


def addresses() -> list[str]:
    """Return the IPv4 addresses of this machine's network interfaces but the loopback, on Linux."""
    found = list[str]()
    if sys.platform != "linux":
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [one for one in found if not one.startswith("127.")]


def must_start(offers: Sequence[Offer]) -> bool:
    """Return whether jax.distributed is to be started, given the offers of all ranks.

    Raises:
      WorldError: some ranks have started it and others have not; or some have opened their devices already.
    """
    started, late = ([rank for rank, one in enumerate(offers) if one.readiness == kind] for kind in (STARTED, LATE))
    if len(offers) == 1 or len(started) == len(offers):
        return False
    if started:
        raise WorldError(
            f"init(devices=True): of {len(offers)} ranks only {started} have started jax.distributed. Start it on "
            "every rank, or leave it to init."
        )
    if late:
        raise WorldError(
            f"init(devices=True): ranks {late} have opened their devices already, and jax.distributed must be started "
            "before. Call init first: above the first array, jax.devices(), and imports of modules that make arrays."
        )
    return True


def address(offers: Sequence[Offer], gather: Callable[[Any], list[Any]]) -> str:
    """Return the address at which all ranks find rank 0. Every rank must call it.

    Raises:
      WorldError: there is none; raised on every rank.
    """
    first, missed = offers[0], list[str]()
    for host in first.hosts:
        found = gather(reaches(host, first.trial))
        if all(found):
            return f"[{host}]:{first.port}" if ":" in host else f"{host}:{first.port}"
        missed.append(f"{host} (not by ranks {[rank for rank, one in enumerate(found) if not one]})")
    raise WorldError(
        f"init(devices=True): rank 0 is not reached by {', nor by '.join(missed)}. Set JDISTGRAD_HOST for rank 0 to a "
        "name or an address by which all nodes reach it; see whether a firewall closes the ports between them."
    )


def reaches(host: str, trial: Trial) -> bool:
    """Return whether this process reaches the one that made a trial, by a name or address."""
    port, expected = trial
    try:
        with socket.create_connection((host, port), TRIAL_SECONDS) as visit, visit.makefile("rb") as answer:
            return answer.read(len(expected)) == expected.encode()
    except (OSError, UnicodeError):
        return False


def start(offers: Sequence[Offer], rank: int, timeout: float, gather: Callable[[Any], list[Any]]) -> None:
    """Start jax.distributed unless it runs, and open the devices. Every rank must call it.

    Arguments:
      gather: exchanges a value among the ranks.
    """
    if must_start(offers):
        found = address(offers, gather)
        # gRPC connects directly, whatever proxy the environment names, and JAX need not warn of that.
        host = found.rpartition(":")[0].strip("[]")
        os.environ[NO_PROXY] = ",".join(filter(None, (os.environ.get(NO_PROXY), host)))
        jax.config.update("jax_check_proxy_envs", False)
        try:
            jax.distributed.initialize(
                found,
                len(offers),
                rank,
                cluster_detection_method="deactivate",
                initialization_timeout=_whole(timeout),
                heartbeat_timeout_seconds=_whole(settings.silence_seconds),
                shutdown_timeout_seconds=_whole(math.inf),  # a rank may go on working after shutdown
            )
        except RuntimeError as error:
            raise WorldError(
                f"init(devices=True): rank {rank} could not start jax.distributed with {len(offers)} ranks and rank 0 "
                f"at {found} within {timeout:g} s: {error}"
            ) from error
    try:
        jax.local_devices()  # on all ranks at the same time: each waits for the others
    except RuntimeError as error:
        raise WorldError(
            f"init(devices=True): rank {rank} could not open its devices: {error}. On CPUs, gloo must be able to look "
            f"up the node's own name: add {socket.gethostname()} to its /etc/hosts, with the address that other nodes "
            "know."
        ) from error


def _whole(seconds: float) -> int:
    return max(1, int(min(seconds, 1e6)))
