"""The start of jax.distributed by the ranks of an MPI job, so that XLA's collectives span the ranks' devices.

JAX's own detection of MPI jobs takes a port from a hash of the host's name, and never asks whether that port is free.
Here rank 0 binds a port, and tells the others over MPI.
"""

import contextlib
import dataclasses
import enum
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jdistgrad._compat import backends_are_initialized, configured
from jdistgrad.config import settings
from jdistgrad.errors import WorldError
from jdistgrad.rpc.worlds import reaching

log = logging.getLogger("jdistgrad.rpc")

NO_PROXY, WARN_OF_PROXIES = "no_grpc_proxy", "jax_check_proxy_envs"


class Readiness(enum.Enum):
    """Whether jax.distributed can be started in a process."""

    READY = "ready"
    STARTED = "has started jax.distributed"
    LATE = "has opened its devices"


@dataclasses.dataclass(frozen=True)
class Offer:
    """A rank's part of the start.

    Attributes:
      machine: differs between machines, also those that have one name.
      hosts: the names and addresses by which other nodes may reach rank 0.
      port: rank 0's, which it has bound.
      trial: where the ranks see whether they reach rank 0.
    """

    readiness: Readiness
    machine: str
    hosts: tuple[str, ...] = ()
    port: int = 0
    trial: reaching.Trial = (0, "")

    def spelled(self) -> tuple[Any, ...]:
        """Return the offer in strings and numbers, to send to the other ranks."""
        return self.readiness.value, self.machine, self.hosts, self.port, self.trial

    @classmethod
    def read(cls, spelled: tuple[Any, ...]) -> "Offer":
        readiness, *rest = spelled
        return cls(Readiness(readiness), *rest)


class Port:
    """A port that this process holds until ``close``; meanwhile it may be bound here once more.

    Attributes:
      trial: where others see whether they reach this process.
    """

    def __init__(self) -> None:
        self._socket, self._door = _bound(), reaching.Door()
        self.number: int = self._socket.getsockname()[1]
        self.trial = self._door.trial

    def close(self) -> None:
        self._socket.close()
        self._door.close()


def _bound() -> socket.socket:
    family, anywhere = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does, which binds the port after us
    if family is socket.AF_INET6:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind((anywhere, 0))
    return held


def offer(port: Port | None) -> Offer:
    """Return this rank's part of the start. ``port``: rank 0's."""
    if jax.distributed.is_initialized():
        readiness = Readiness.STARTED
    else:
        readiness = Readiness.LATE if backends_are_initialized() else Readiness.READY
    if port is None:
        return Offer(readiness, _machine())
    return Offer(readiness, _machine(), tuple(reaching.hosts()), port.number, port.trial)


def _machine() -> str:
    """Return a text that differs between machines, and between containers of one machine with names of their own."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as started:
        return f"{socket.gethostname()} {started.read()} {os.stat('/proc/self/ns/net').st_ino}"
    return socket.gethostname()


def must_start(offers: Sequence[Offer]) -> bool:
    """Return whether jax.distributed is to be started, given the offers of all ranks.

    Raises:
      WorldError: some ranks have started it and others have not; or some have opened their devices already.
    """
    ranks = {kind: [rank for rank, one in enumerate(offers) if one.readiness is kind] for kind in Readiness}
    if len(offers) == 1 or len(ranks[Readiness.STARTED]) == len(offers):
        return False
    if ranks[Readiness.STARTED]:
        raise WorldError(
            f"init(devices=True): of {len(offers)} ranks only {ranks[Readiness.STARTED]} have started jax.distributed. "
            "Start it on every rank, or leave it to init."
        )
    if ranks[Readiness.LATE]:
        raise WorldError(
            f"init(devices=True): ranks {ranks[Readiness.LATE]} have opened their devices already, and "
            "jax.distributed must be started before. Call init first: above the first array, jax.devices(), and "
            "imports of modules that make arrays."
        )
    return True


def of_one_machine(offers: Sequence[Offer]) -> bool:
    return len({one.machine for one in offers}) == 1


def address(offers: Sequence[Offer], gather: Callable[[Any], list[Any]]) -> str:
    """Return the address at which the ranks find rank 0. Every rank must call it."""
    first = offers[0]
    host = "127.0.0.1" if of_one_machine(offers) else reaching.reached_by_all(first.hosts, first.trial, gather)
    return f"[{host}]:{first.port}" if ":" in host else f"{host}:{first.port}"


def start(offers: Sequence[Offer], rank: int, timeout: float, gather: Callable[[Any], list[Any]]) -> None:
    """Start jax.distributed unless it runs, and open the devices. Every rank must call it.

    Arguments:
      gather: exchanges a value among the ranks.
    """
    if must_start(offers):
        found = address(offers, gather)
        try:
            with _without_proxy(found):
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
    _open_devices(rank)
    if not of_one_machine(offers):
        text = not_reached_by_gloo(gather(_own_address() if jax.default_backend() == "cpu" else ""))
        if text and rank == 0:
            log.warning(text)


def _open_devices(rank: int) -> None:
    """Open the devices on all ranks at the same time: each waits for the others."""
    try:
        jax.local_devices()
    except RuntimeError as error:
        raise WorldError(
            f"init(devices=True): rank {rank} could not open its devices: {error}. On CPUs, gloo must be able to look "
            f"up the node's own name: add {socket.gethostname()} to its /etc/hosts, with the address that other nodes "
            "know."
        ) from error


def _own_address() -> str:
    """Return the address that this node's own name stands for; gloo, XLA's collectives on CPUs, gives it to others."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "unknown"


def not_reached_by_gloo(found: Sequence[str]) -> str:
    """Return a warning if some of the ranks, of several machines, tell the others a loopback address; else ""."""
    wrong = {rank: one for rank, one in enumerate(found) if reaching.is_loopback(one)}
    if not wrong:
        return ""
    return (
        "init(devices=True): on CPUs, XLA's collectives (gloo) will fail between the machines: they tell the others "
        f"the address of a node's own name, which is {wrong} on these ranks. Give the name another address in "
        "/etc/hosts there. Averages by MPI, which DataParallel chooses by default on CPUs, do not need it."
    )


def _whole(seconds: float) -> int:
    return max(1, int(min(seconds, 1e6)))


@contextlib.contextmanager
def _without_proxy(found: str) -> Iterator[None]:
    """Let gRPC connect directly, whatever proxy the environment names."""
    before, warns = os.environ.get(NO_PROXY), configured(WARN_OF_PROXIES)
    os.environ[NO_PROXY] = found.rpartition(":")[0].strip("[]")
    jax.config.update(WARN_OF_PROXIES, False)
    try:
        yield
    finally:
        jax.config.update(WARN_OF_PROXIES, warns)
        if before is None:
            del os.environ[NO_PROXY]
        else:
            os.environ[NO_PROXY] = before
