"""The collectives of the current world."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax

from jdistgrad.collectives import world
from jdistgrad.collectives.devices import Devices, UnusableDevicesError
from jdistgrad.collectives.host import TIMEOUT, HostCollectives, Local
from jdistgrad.collectives.mpi import MPI
from jdistgrad.collectives.roll_call import agree
from jdistgrad.config import settings
from jdistgrad.errors import CollectiveError, WorkerLostError
from jdistgrad.rpc.caller import checked_timeout
from jdistgrad.rpc.worker import current_worker

log = logging.getLogger("jdistgrad.data_parallel")


def of_this_world(
    workers: Sequence[Any] | None = None, *, check: bool = True, timeout: float = TIMEOUT
) -> HostCollectives:
    """Return new collectives of all workers of this world, or of some.

    Every one of these workers must call it, in the same order, one call after the other: calls by ``rpc_async`` and
    ``remote`` that are not waited for run in any order.

    Arguments:
      workers: their names, infos or ranks in the world, in the order of their ranks in the collectives; default all.
      check: whether ranks meet before each operation in compiled code too. Without the meeting, ranks that run
        different programs get wrong sums, or wait without end.
      timeout: seconds to wait for the slowest worker, in the making and later (the attribute ``timeout``).

    Raises:
      MissingRanksError: some workers did not come to make them in time.

    Example:
      >>> trainers = jd.collectives.of_this_world(range(jd.world_size() - 1))  # without the last
    """
    worker = current_worker()
    chosen = None if workers is None else _checked(workers)
    for rank in range(worker.size) if chosen is None else chosen:
        if rank in worker.peers.lost:
            raise WorkerLostError(
                f"{worker.peers.lost[rank]}, so it cannot take part in new collectives. Name the remaining workers, "
                "on all of them: jd.collectives.of_this_world([...]).",
                worker=worker.directory.workers[rank],
            )
    made = Local(chosen) if world.is_local(worker) else _between_processes(chosen, checked_timeout(timeout))
    return made.adjusted(meets_in_programs=check, timeout=checked_timeout(timeout))


def _between_processes(chosen: tuple[int, ...] | None, timeout: float) -> MPI:
    """Return XLA's collectives on accelerators that ``jax.distributed`` connects; else MPI's."""
    comm = None if chosen is None else world.subset(chosen, timeout)
    if settings.collectives == "devices":
        return Devices(comm, timeout=timeout)
    if not settings.collectives and jax.distributed.is_initialized() and jax.default_backend() != "cpu":
        try:
            return Devices(comm, timeout=timeout)
        except UnusableDevicesError as error:  # on all ranks
            log.warning("%s Gradients are averaged over MPI, in host memory.", error)
    return MPI(comm, on_device=settings.collectives == "mpi-on-device", timeout=timeout)


def able_to_go_on(collectives: HostCollectives) -> HostCollectives:
    """Return a twin, which survives dead ranks if the world does. Every rank must call it."""
    if not (isinstance(collectives, MPI) and collectives.keeper().survives):
        return collectives.twin()
    from jdistgrad.collectives.survivors import Survivors  # which imports mpi4py

    return Survivors(collectives)


def _checked(workers: Sequence[Any]) -> tuple[int, ...]:
    here = current_worker()
    if isinstance(workers, str | int) or not isinstance(workers, Iterable):
        raise CollectiveError(
            f"of_this_world({workers!r}): expected a sequence of workers, such as range({here.size}) or [{here.rank}]."
        )
    chosen = tuple(one if isinstance(one, int) else here.directory.find(one).rank for one in workers)
    if here.rank not in chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(here.size)):
        raise CollectiveError(
            f"collectives of the workers {list(chosen)}, made by worker {here.rank} of {here.size}: expected ranks of "
            "this world, each once, the caller's among them. Workers outside a group take no part in it."
        )
    return chosen


def shared(timeout: float = TIMEOUT) -> HostCollectives:
    """Return the world's shared collectives, made on first use, within a timeout. Every worker must call it."""
    kept = current_worker().kept
    if "collectives" not in kept:
        kept["collectives"] = of_this_world(timeout=timeout).adjusted(timeout=TIMEOUT)
    return cast("HostCollectives", kept["collectives"])


def barrier(*, timeout: float | None = None) -> None:
    """Return when every worker of this world has called ``barrier``.

    Arguments:
      timeout: seconds to wait; by default 300.

    Raises:
      MissingRanksError: some workers did not come in time; the message names them. This world has no barrier from then
        on, since those workers may still come.
      DisagreementError: a worker is in another collective instead.
    """
    seconds = TIMEOUT if timeout is None else checked_timeout(timeout)
    agree(shared(seconds), "jdistgrad.barrier", seconds)
