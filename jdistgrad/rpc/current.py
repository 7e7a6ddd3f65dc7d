"""Which worker a piece of code runs on.

A process under mpirun is one worker. In a local world a thread belongs to one: the threads that serve calls, and
those ``spawn`` starts, are bound to theirs; every other thread takes the process's own, if it has one.
"""

import contextvars
from typing import TYPE_CHECKING

import jax

from jdistgrad.errors import NotInitializedError
from jdistgrad.rpc.directory import WorkerInfo

if TYPE_CHECKING:
    from jdistgrad.rpc.worker import Worker

_bound: contextvars.ContextVar["Worker | None"] = contextvars.ContextVar("jdistgrad_worker", default=None)
_seated: contextvars.ContextVar[bool] = contextvars.ContextVar("jdistgrad_seated", default=False)
_of_process: "Worker | None" = None

# Part of JAX's trace key: a function traced on one worker is traced anew on another of the same process. The value is
# compared at every dispatch: a small number for each kind of worker, not the worker itself.
_trace_key = jax.make_user_context(default_value=None)
_trace_keys: dict[tuple[WorkerInfo, int], int] = {}


def current_worker() -> "Worker":
    """The worker this code runs on. Raises NotInitializedError where there is none."""
    worker = find_worker()
    if worker is None:
        raise NotInitializedError(
            "there is no world here: jdistgrad.init() was not called, or shutdown() was. Call init() first; in a "
            "thread started inside spawn's main, run its target with contextvars.copy_context().run."
        )
    return worker


def find_worker() -> "Worker | None":
    """The worker this code runs on, if any."""
    worker = _bound.get()
    return worker if worker is not None or _seated.get() else _of_process


def seat_thread() -> None:
    """Let this thread have a worker of its own or none, whatever the process has."""
    _seated.set(True)


def bind_thread(worker: "Worker") -> None:
    """Let this thread, and contexts copied from it, belong to a worker."""
    _bound.set(worker)
    if worker.shares_process:
        key = _trace_keys.setdefault((worker.info, worker.size), len(_trace_keys))
        _trace_key(key).__enter__()
    if worker.device is not None:
        jax.default_device(worker.device).__enter__()


def bind_process(worker: "Worker") -> None:
    """Let every thread that is not bound belong to a worker."""
    global _of_process
    _of_process = worker


def unbind(worker: "Worker") -> None:
    """The worker has left its world."""
    global _of_process
    if _bound.get() is worker:
        _bound.set(None)
    if _of_process is worker:
        _of_process = None
