"""Forks of a worker's process, which are no workers: the child has neither the worker's threads nor its place in MPI.

The fork handler runs in the child, where a thread that does not exist there may hold any lock, so it takes no lock.
"""

import os
import weakref

from jdistgrad.rpc import current
from jdistgrad.rpc.worker import Worker

_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


def watch(worker: Worker) -> None:
    """Sever this worker's copy in every later fork of this process."""
    _workers.add(worker)


def _in_child() -> None:
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


os.register_at_fork(after_in_child=_in_child)
