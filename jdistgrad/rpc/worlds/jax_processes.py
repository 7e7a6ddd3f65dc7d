"""The start of jax.distributed by the ranks of an MPI job, so that XLA's collectives span the ranks' devices.

JAX's own detection of MPI jobs takes a port from a hash of the host's name, and never asks whether that port is free.
Here rank 0 binds a port, and tells the others over MPI.
"""

import contextlib
import dataclasses
import enum
import math
import os
import socket
from collections.abc import Iterator, Sequence

import jax

from jdistgrad._compat import backends_are_initialized, configured
from jdistgrad.config import settings
from jdistgrad.errors import WorldError

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
      host: the name by which other nodes find this process.
      machine: differs between machines, also those that have one name.
      port: rank 0's, which it has bound.
    """

    readiness: Readiness
    host: str
    machine: str = ""
    port: int = 0

    def spelled(self) -> tuple[str, str, str, int]:
        """Return the offer in strings and numbers, to send to the other ranks."""
        return self.readiness.value, self.host, self.machine, self.port

    @classmethod
    def read(cls, spelled: tuple[str, str, str, int]) -> "Offer":
        readiness, host, machine, port = spelled
        return cls(Readiness(readiness), host, machine, port)


class Port:
    """A port that this process holds until ``close``; meanwhile it may be bound here once more."""

    def __init__(self) -> None:
        self._socket = _bound()
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


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
    number = port.number if port is not None else 0
    return Offer(readiness, settings.host or socket.gethostname(), _machine(), number)


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


def address(offers: Sequence[Offer]) -> str:
    """Return the address at which the ranks find rank 0."""
    alone = len({one.machine for one in offers}) == 1
    host = "127.0.0.1" if alone else offers[0].host
    return f"[{host}]:{offers[0].port}" if ":" in host else f"{host}:{offers[0].port}"


def start(offers: Sequence[Offer], rank: int, timeout: float) -> None:
    """Start jax.distributed unless it runs, and open the devices. Every rank must call it."""
    if must_start(offers):
        found = address(offers)
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
                f"at {found} within {timeout:g} s: {error}. If other nodes do not find rank 0's node by that name, set "
                "JDISTGRAD_HOST for rank 0 to a name or an address that they know."
            ) from error
    jax.local_devices()  # opens them on all ranks at the same time: each waits for the others


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
