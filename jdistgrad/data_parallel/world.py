"""The only place here that asks which world this code is in."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

from jdistgrad import errors
from jdistgrad.rpc.current import current_worker

_kept: "weakref.WeakKeyDictionary[Any, dict[str, Any]]" = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Seat:
    """A worker's place among the threads of a local world. ``check`` raises once the world is gone."""

    world: str
    rank: int
    size: int
    owner: Any
    check: Callable[[], None]


def seat() -> Seat:
    """This worker's place."""
    worker = current_worker()

    def check() -> None:
        if worker.failure is not None:
            raise worker.failure
        if worker.closed:
            raise errors.WorldClosedError(
                f"collectives of {worker.info}: their world has been shut down. Make new ones in this one.",
                worker=worker.info,
            )

    return Seat(worker.world, worker.rank, worker.size, worker, check)


def is_local() -> bool:
    """Whether this world's workers are threads of one process."""
    worker = current_worker()
    return worker.shares_process or worker.size == 1


def keep(name: str, value: Any) -> None:
    """Keep something as long as this world stands."""
    _kept.setdefault(current_worker(), {})[name] = value


def kept(name: str) -> Any:
    """What was kept under a name in this world; None: nothing."""
    return _kept.get(current_worker(), {}).get(name)
