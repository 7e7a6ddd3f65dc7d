"""Forks of a worker's process, which are no workers: the child has neither the worker's threads nor its place in MPI.

The handler in the child takes no lock, since a thread that does not exist there may hold it.
"""

import ctypes
import os
import threading
import weakref

from jax.extend import backend

from jdistgrad._compat import backends_are_initialized
from jdistgrad.rpc import current
from jdistgrad.rpc.worker import Worker

_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()
_fork = threading.local()  # of the thread that forks: JAX's clients meanwhile


def watch(worker: Worker) -> None:
    """Sever this worker's copy in every later fork of this process."""
    _workers.add(worker)


def _before() -> None:
    _fork.clients = list(backend.backends().values()) if _workers and backends_are_initialized() else []


def _in_parent() -> None:
    _fork.clients = []


def _in_child() -> None:
    for client in _fork.clients:  # the end of a client waits for its threads, which crashes where they do not exist
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    came_along = [worker for worker in _workers if not (worker.closed and worker.transport.hands_over)]
    if came_along:
        whose = ", ".join(str(worker.info) for worker in came_along[:3])
        why = (
            f"this process was forked from that of {whose}{' ...' if len(came_along) > 3 else ''} and has no world: "
            "neither threads nor MPI outlive a fork. Leave calls to the process it was forked from, or start it with "
            "subprocess or multiprocessing's 'spawn'."
        )
        for worker in came_along:
            worker.sever(why)
        current.leave_behind(why)


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
