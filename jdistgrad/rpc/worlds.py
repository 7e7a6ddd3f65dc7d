"""Opening worlds: under mpirun, as threads of one process, in a notebook; and what programs ask of theirs."""

import contextlib
import dataclasses
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

import jax

from jdistgrad import errors
from jdistgrad._compat import forget_failed_effects
from jdistgrad.config import settings
from jdistgrad.rpc import current, devices, directory, jax_processes, leaving, waits
from jdistgrad.rpc.caller import checked_timeout
from jdistgrad.rpc.codec import PickleCodec
from jdistgrad.rpc.current import seat
from jdistgrad.rpc.directory import Directory, Hello, Names, WorkerInfo, agree, name_of
from jdistgrad.rpc.leaving import close
from jdistgrad.rpc.peers import Callback
from jdistgrad.rpc.worker import Worker, current_worker, find_worker
from jdistgrad.wire import launcher_env, mpi_start
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.local import Hub, LocalTransport
from jdistgrad.wire.message import spell
from jdistgrad.wire.transport import Transport

if TYPE_CHECKING:
    from jdistgrad.wire.mpi_job import MPIJob

LOGGERS = tuple(f"jdistgrad.{name}" for name in ("data_parallel", "rpc", "threads", "wire"))


def init(
    name: Names = None,
    *,
    timeout: float = 60.0,
    devices: bool | None = None,
    survive: bool | None = None,
) -> WorkerInfo:
    """Join the world this program runs in.

    Under mpirun it is the world of the MPI job; in a thread started by ``spawn``, the local world of ``spawn``;
    elsewhere a world of one worker. Every worker of the world must call ``init``, and ``shutdown`` at the end. ``init``
    returns when all workers have called it.

    Arguments:
      name: this worker's name, unique in the world, of up to 64 printable characters without spaces; ``"{rank}"`` in it
        stands for the rank. Or the names of all ranks in a list, or a function that returns the name for a rank.
        Defaults to ``"worker{rank}"``.
      timeout: seconds after which an unanswered call fails, unless the call has a timeout of its own; also the time
        that ``init`` waits for the other workers.
      devices: start ``jax.distributed``, so that XLA's collectives reach the devices of all ranks
        (``collectives.Devices``); the first ``init`` with it must come before the program's first array. Every worker
        must give the same value; the default is the environment variable ``JDISTGRAD_DEVICES``, 0 or 1. In a world
        within one process there is nothing to start.
      survive: go on without a worker that dies or fails, instead of ending the job. What needs the lost worker raises
        WorkerLostError. Needs Open MPI 5 and a job started by ``jdistgrad run --survive`` or ``mpirun --with-ft ulfm``;
        must come before ``mpi4py.MPI`` is imported, unless ``MPI4PY_RC_FINALIZE=0``. Every worker must give the same
        value; the default is the environment variable ``JDISTGRAD_SURVIVE``, 0 or 1. The workers of a world within
        one process die together.

    Returns:
      This worker's rank and name.

    Raises:
      AlreadyInitializedError: a world is already open here.
      WorldError: a worker is missing, two have the same name, or they run different versions or scripts; or
        ``jax.distributed`` cannot be started; or the job cannot survive.

    Example:
      >>> me = jd.init()
      >>> if me.rank == 0:
      ...     print(jd.rpc_sync("worker1", jnp.add, args=(1, 2)))
      >>> jd.shutdown()

      Names by role, given alike on every rank:

      >>> me = jd.init(lambda rank: "server" if rank == 0 else f"trainer{rank}")
      >>> jd.shutdown()
    """
    refuse_second_world("init")
    forget_failed_effects()
    seconds = checked_timeout(timeout)
    place = seat.get()
    if place is not None:
        worker = open_local(*place, name, seconds)
        current.bind_thread(worker)
        return worker.info
    if launcher_env.launched():
        with_devices = settings.devices if devices is None else devices
        survives = settings.survive if survive is None else survive
        worker = open_process(name, seconds, with_devices=with_devices, survive=survives)
        current.bind_process(worker)
    else:
        opened: Worker | None = None
        try:
            with put_off_interrupt():  # in its midst even ``Thread.start`` would leave a lock in disorder
                worker = opened = open_local(Hub(1), 0, name, seconds)
                current.bind_process(worker)
        except BaseException:
            if opened is not None:
                close(opened, graceful=False)
            raise
    return worker.info


def on_lost(callback: Callback) -> Callback:
    """Have a function called for each worker that is lost: ``callback(worker, why)``, on this worker.

    It is called once for each lost worker, also for those lost before, on a thread that may wait and call other
    workers; ``shutdown`` waits for it. An exception that it raises is logged. Where the job ends with the lost worker
    (without ``init(survive=True)``), it may be called before that; in a world within one process it never is.

    Returns:
      The callback.

    Example:
      >>> @jd.on_lost
      ... def forget(worker, why):
      ...     trainers.discard(worker.name)
    """
    current_worker().peers.call_on_lost(callback)
    return callback


def worker_info(name: str | None = None) -> WorkerInfo:
    """Return a worker's rank and name, by default this worker's. Raises UnknownWorkerError for an unknown name."""
    worker = current_worker()
    return worker.info if name is None else worker.directory.find(name)


def launched() -> bool:
    """Return whether this program is one worker of several, started by mpirun, ``spawn`` or ``jdistgrad run --local``.

    Example:
      >>> main() if jd.launched() else jd.spawn(main, 3)
    """
    return seat.get() is not None or launcher_env.launched()


def rank() -> int:
    """Return the rank of this worker: also before ``init`` and after ``shutdown``, the rank that ``init`` gives it.

    Example:
      >>> name = "server" if jd.rank() == 0 else "trainer{rank}"
    """
    worker, place = find_worker(), seat.get()
    if worker is not None:
        return worker.rank
    if place is not None:
        return place[1]
    if not launcher_env.launched() and current.is_stray_thread():
        return current_worker().rank  # raises
    return launcher_env.rank()


def local_rank() -> int:
    """Return the rank of this worker among the workers of its machine: also before ``init`` and after ``shutdown``."""
    worker = find_worker()
    is_thread = seat.get() is not None or (worker is not None and worker.hands_over)
    return launcher_env.local_rank() if launcher_env.launched() and not is_thread else rank()


def world_size() -> int:
    """Return how many workers the world has."""
    return current_worker().size


# Opening: meet the others, agree, connect.


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
    waits.start_if_asked()
    if hub.size > 1:
        devices.compile_beside_waiting_programs()
    hello = Hello(name_of(name, rank, hub.size), uuid.uuid4().hex, {})
    world = hub.next_world(rank)  # after what may be refused: the others are in this world
    hellos = world.gather(rank, hello, timeout)
    chips = jax.local_devices()
    device = chips[rank % len(chips)] if len(chips) > 1 else None
    return _open(hellos[0].world, rank, agree(hellos), LocalTransport(world, rank), timeout=timeout, device=device)


def open_process(name: Names, timeout: float, *, with_devices: bool, survive: bool) -> Worker:
    """Open the worker of a process that a launcher has started."""
    waits.start_if_asked()
    if survive and with_devices:
        raise errors.WorldError(
            "init(survive=True, devices=True): jax.distributed ends all processes when one dies, and XLA's collectives "
            "cannot go on without it. Leave one of the two out."
        )
    now = time.monotonic()
    launcher_env.leave_note(launcher_env.CALLED, f"{now} {now + timeout}")
    job = mpi_start.start(timeout, survive=survive)
    if job.size > 1:
        leaving.guard(job)
    devices.take_process_device(launcher_env.local_rank())
    facts = directory.facts_of_this_process()
    facts |= {directory.DEVICES: str(with_devices), directory.SURVIVE: str(survive)}
    hello = Hello(name_of(name, job.rank, job.size), uuid.uuid4().hex, facts, card=devices.card_to_share())
    with contextlib.ExitStack() as if_failed:
        if_failed.callback(job.withdraw)
        hellos, workers = _meet(job, dataclasses.replace(hello, offer=job.offer()), timeout, with_devices=with_devices)
        world = hellos[0].world
        transport = job.connect([one.offer for one in hellos], timeout)
        settings = {"end_job": job.end, "report": leaving.report, "survives": survive}
        worker = _open(world, job.rank, workers, transport, timeout=timeout, **settings)
        if_failed.pop_all()
    leaving.joined(worker)
    return worker


def _meet(job: "MPIJob", hello: Hello, timeout: float, *, with_devices: bool) -> tuple[list[Hello], Directory]:
    """Exchange the hellos of all ranks, see that the ranks fit together, and do what they must do together."""
    with contextlib.ExitStack() as until_started:
        if with_devices:
            port = until_started.enter_context(contextlib.closing(jax_processes.Port())) if job.rank == 0 else None
            hello = dataclasses.replace(hello, devices=dataclasses.astuple(jax_processes.offer(port)))
        said = job.gather([getattr(hello, field.name) for field in dataclasses.fields(hello)], timeout)
        directory.check_facts([facts for _, _, facts, *_ in said])  # first: another version's hellos have other fields
        hellos = [Hello(*one) for one in said]
        devices.share_memory(hello.card, [one.card for one in hellos])
        found = agree(hellos)
        if with_devices:
            offers = [jax_processes.Offer(*one.devices) for one in hellos]
            jax_processes.start(offers, job.rank, timeout, lambda one: job.gather(one, timeout))
    return hellos, found


def _open(world: str, rank: int, workers: Directory, transport: Transport, **settings: Any) -> Worker:
    worker = Worker(world, rank, workers, transport, PickleCodec(), **settings)
    waits.workers.add(worker)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(add_fields)  # once, however often it is added
    try:
        transport.start(worker)
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
