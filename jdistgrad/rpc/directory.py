"""Who is in a world: names and ranks."""

import dataclasses
import numbers
from collections.abc import Sequence

from jdistgrad.errors import DuplicateNameError, UnknownWorkerError, WorldError


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class WorkerInfo:
    """A worker's rank and name. It can be compared, hashed, sent, and used as the target of a call."""

    rank: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank})"


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """What a worker says of itself when it joins."""

    name: str
    world: str
    version: str
    allow_code: bool


class Directory:
    """The workers of a world, found by rank, name or info."""

    def __init__(self, names: Sequence[str]):
        self.workers = tuple(WorkerInfo(rank, name) for rank, name in enumerate(names))
        self._by_name = {worker.name: worker for worker in self.workers}

    def find(self, to: "str | int | WorkerInfo") -> WorkerInfo:
        """The worker somebody means.

        Raises:
          UnknownWorkerError: no such worker; it lists those there are.
          ValueError: neither a name nor a whole number.
        """
        if isinstance(to, WorkerInfo):
            found = self.workers[to.rank] if to in self.workers else None
        elif isinstance(to, str):
            found = self._by_name.get(to)
        elif isinstance(to, numbers.Integral):
            found = self.workers[to] if 0 <= to < len(self.workers) else None
        else:
            raise ValueError(
                f"a worker is named by its name, its rank or its info, not by {to!r} ({type(to).__name__})"
            )
        if found is None:
            hint = " `jdistgrad run -n 2 program.py` starts more." if len(self.workers) == 1 else ""
            raise UnknownWorkerError(f"no worker {to!r} in this world. It has {self}.{hint}", worker=to)
        return found

    def __str__(self) -> str:
        shown = [worker.name for worker in self.workers[:8]]
        return ", ".join(shown) + (f" and {len(self.workers) - 8} more" if len(self.workers) > 8 else "")


def agree(hellos: Sequence[Hello]) -> Directory:
    """The directory of a world whose workers said this.

    Raises:
      DuplicateNameError: two workers of one name.
      WorldError: they disagree on what all must share.
    """
    ranks: dict[str, int] = {}
    for rank, hello in enumerate(hellos):
        if hello.name in ranks:
            raise DuplicateNameError(
                f"init: ranks {ranks[hello.name]} and {rank} both want the name {hello.name!r}. "
                "Names must be unique; leave name out for worker0, worker1, ...",
                name=hello.name,
            )
        ranks[hello.name] = rank
    for what in ("version", "allow_code"):
        _same([getattr(hello, what) for hello in hellos], what)
    return Directory([hello.name for hello in hellos])


def _same(values: Sequence[object], what: str) -> None:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise WorldError(
                f"init: the workers disagree on {what}: rank 0 has {values[0]!r}, rank {rank} has {value!r}. "
                "Start every rank with the same program and the same installation.",
                what=what,
            )
