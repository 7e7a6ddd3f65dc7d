"""The only place here that asks which world this code is in."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jdistgrad import errors
from jdistgrad.rpc.current import left_behind
from jdistgrad.rpc.members.watchdog import Engagement, Occasion as Occasion
from jdistgrad.rpc.worker import current_worker

_kept: "weakref.WeakKeyDictionary[Any, dict[str, Any]]" = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Seat:
    """A worker's place among the threads of a local world. ``check`` raises once the world is gone."""

    world: str
    rank: int
    size: int
    owner: Any
    check: Callable[[], None]


class Together:
    """A block in which a worker takes part in something with others of its world, as its watchdog knows.

    Arguments:
      worker: the worker; None: there is no world, and nobody watches.
      ranks: everybody's, in the world.
      blocking: whether it is inside MPI, where only the end of the job would end it.
    """

    __slots__ = ("_blocking", "_engagement", "_occasion", "_ranks", "_worker")

    def __init__(self, worker: Any, occasion: Occasion, ranks: Sequence[int], *, blocking: bool):
        self._worker, self._occasion, self._ranks, self._blocking = worker, occasion, ranks, blocking
        self._engagement: Engagement | None = None

    def __enter__(self) -> "Together":
        if self._worker is not None and len(self._ranks) > 1:
            self._engagement = self._worker.watchdog.begin(self._occasion, self._ranks, blocking=self._blocking)
        return self

    def __exit__(self, *error: object) -> None:
        if self._engagement is not None:
            self._worker.watchdog.end(self._engagement)

    def check(self) -> None:
        """Raise where somebody will never come."""
        if self._engagement is not None:
            self._engagement.check()

    def places(self, missing: Sequence[int]) -> dict[int, str]:
        """Where those of these ranks (in the group) are that still answer."""
        if self._worker is None:
            return {}
        found = self._worker.watchdog.ask([self._ranks[one] for one in missing], self._occasion)
        return {one: found[self._ranks[one]].place for one in missing if self._ranks[one] in found}


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


def refuse_forked_process(what: str) -> None:
    """Raises NotInitializedError in a process that was forked from a worker's: MPI is its parent's."""
    why = left_behind()
    if why is not None:
        raise errors.NotInitializedError(f"{what}: {why}")


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
