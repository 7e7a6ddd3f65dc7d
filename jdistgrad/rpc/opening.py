"""The opening of a worker: meet the others, agree, connect."""

import contextlib
import dataclasses
import logging
import time
import uuid
from typing import Any

import jax

from jdistgrad import errors
from jdistgrad.rpc import current, devices, directory, jax_processes, process_exit, stacks
from jdistgrad.rpc.codec import PickleCodec
from jdistgrad.rpc.directory import Directory, Hello, Names, agree, name_of
from jdistgrad.rpc.worker import Worker, find_worker
from jdistgrad.wire import launcher_env, mpi_start
from jdistgrad.wire.local import Hub, LocalTransport
from jdistgrad.wire.message import spell
from jdistgrad.wire.transport import Job, Transport

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
    chips = jax.local_devices()
    device = chips[rank % len(chips)] if len(chips) > 1 else None
    return _open(hellos[0].world, rank, agree(hellos), LocalTransport(world, rank), timeout=timeout, device=device)


def open_process(name: Names, timeout: float, *, with_devices: bool, survive: bool) -> Worker:
    """Open the worker of a process that a launcher has started."""
    stacks.start_if_asked()
    if survive and with_devices:
        raise errors.WorldError(
            "init(survive=True, devices=True): jax.distributed ends all processes when one dies, and XLA's collectives "
            "cannot go on without it. Leave one of the two out."
        )
    now = time.monotonic()
    launcher_env.leave_note(launcher_env.CALLED, f"{now} {now + timeout}")
    job = mpi_start.start(timeout, survive=survive)
    if job.size > 1:
        process_exit.guard(job)
    devices.take_process_device(launcher_env.local_rank())
    facts = directory.facts_of_this_process()
    facts |= {directory.DEVICES: str(with_devices), directory.SURVIVE: str(survive)}
    hello = Hello(name_of(name, job.rank, job.size), uuid.uuid4().hex, facts, card=devices.card_to_share())
    with contextlib.ExitStack() as if_failed:
        if_failed.callback(job.withdraw)
        hellos, workers = _meet(job, dataclasses.replace(hello, offer=job.offer()), timeout, with_devices=with_devices)
        world = hellos[0].world
        transport = job.connect(world, [one.offer for one in hellos], timeout)
        settings = {"end_job": job.end, "report": process_exit.report, "survives": survive}
        worker = _open(world, job.rank, workers, transport, timeout=timeout, **settings)
        if_failed.pop_all()
    process_exit.joined(worker)
    return worker


def _meet(job: Job, hello: Hello, timeout: float, *, with_devices: bool) -> tuple[list[Hello], Directory]:
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
    stacks.workers.add(worker)
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
