"""Opening worlds: under mpirun, as threads of one process, in a notebook; and what programs ask of theirs."""

from jdistgrad._compat import forget_failed_effects
from jdistgrad.config import settings
from jdistgrad.rpc import current
from jdistgrad.rpc.caller import checked_timeout
from jdistgrad.rpc.current import seat
from jdistgrad.rpc.directory import Names, WorkerInfo
from jdistgrad.rpc.leaving import close
from jdistgrad.rpc.opening import open_local, open_process, refuse_second_world
from jdistgrad.rpc.peers import Callback
from jdistgrad.rpc.worker import Worker, current_worker, find_worker
from jdistgrad.wire import launcher_env
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.local import Hub


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
