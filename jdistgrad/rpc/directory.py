"""The workers of a world: their names and ranks, and the facts that must agree on all of them."""

import dataclasses
import hashlib
import importlib.metadata
import numbers
import os
import pathlib
import platform
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jaxlib.version
import numpy as np

from jdistgrad._version import __version__
from jdistgrad.config import settings
from jdistgrad.errors import DuplicateNameError, UnknownWorkerError, WorldError

LONGEST_NAME = 64

SCRIPT, X64, DEVICES, SURVIVE = "the script", "jax_enable_x64", "devices", "survive"
COLLECTIVES = "JDISTGRAD_COLLECTIVES"
TEST = "the test"
REMEDIES = {
    SCRIPT: "Start every rank with the same program. Where different ones are meant (mpirun -n 1 python a.py : -n 2 "
    "python b.py), set JDISTGRAD_SAME_SCRIPT=0; functions to be called belong in modules that all can import.",
    X64: 'Set jax.config.update("jax_enable_x64", True) on every rank before init, or on none.',
    COLLECTIVES: "Set it on every rank, or on none; mpirun passes it on to other nodes with -x JDISTGRAD_COLLECTIVES.",
    DEVICES: "Give init the same devices on every rank.",
    TEST: "Every rank must run the same tests in the same order: give pytest-randomly a seed (--randomly-seed=1), "
    "parametrize by lists, not by sets, and skip a test on all ranks or on none.",
    SURVIVE: "Give init the same survive on every rank, or set JDISTGRAD_SURVIVE alike.",
}
SAME_INSTALLATION = "Start every rank with the same installation."

Names = str | Sequence[str] | Callable[[int], str] | None  # what ``init`` takes as the name


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class WorkerInfo:
    """A worker's rank and name, which can be compared, hashed, sent, and used as the target of a call."""

    rank: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank})"


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """A worker's description of itself when it joins.

    Attributes:
      facts: what must agree on all workers, see ``facts_of_this_process``.
      devices: this worker's part of the start of jax.distributed; None if that is not asked for.
      offer: what other workers need to connect to this one, see ``wire.mpi_job``.
      card: the GPU that JAX will open in this process; "" if none, or unknown.
    """

    name: str
    world: str
    facts: Mapping[str, str]
    devices: Any = None
    offer: Any = None
    card: str = ""


class Directory:
    def __init__(self, names: Sequence[str]):
        self.workers = tuple(WorkerInfo(rank, name) for rank, name in enumerate(names))
        self._by_name = {worker.name: worker for worker in self.workers}

    def find(self, to: "str | int | WorkerInfo") -> WorkerInfo:
        """Return the worker that a name, a rank or an info stands for.

        Raises:
          UnknownWorkerError: there is no such worker; the message lists the workers of the world.
          ValueError: ``to`` is neither a name, a whole number nor an info.
        """
        if type(to) is int and 0 <= to < len(self.workers):
            return self.workers[to]
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

    def find_all(self, several: Iterable[str | int | WorkerInfo]) -> list[WorkerInfo]:
        """Return the workers that several names, ranks or infos stand for."""
        if isinstance(several, str):  # whose letters might be names
            raise TypeError(f"this takes a list of workers: for a single one, [{several!r}]")
        return [self.find(one) for one in several]

    def __str__(self) -> str:
        shown = [worker.name for worker in self.workers[:8]]
        return ", ".join(shown) + (f" and {len(self.workers) - 8} more" if len(self.workers) > 8 else "")


def agree(hellos: Sequence[Hello]) -> Directory:
    """Return the directory of a world, from the hellos of its workers.

    Raises:
      DuplicateNameError: two workers have the same name.
      WorldError: the facts of the workers differ.
    """
    ranks: dict[str, int] = {}
    for rank, hello in enumerate(hellos):
        if hello.name in ranks:
            raise DuplicateNameError(
                f"init: ranks {ranks[hello.name]} and {rank} both want the name {hello.name!r}. "
                "Names must be unique: init('trainer{rank}') makes them so; left out, they are worker0, worker1, ...",
                name=hello.name,
            )
        ranks[hello.name] = rank
    check_facts([hello.facts for hello in hellos])
    return Directory([hello.name for hello in hellos])


def check_facts(facts: Sequence[Mapping[str, str]]) -> None:
    """Raise WorldError if ranks differ in a fact. A rank that does not state a fact is not compared in it."""
    for what in dict.fromkeys(what for one in facts for what in one):
        values = {rank: one[what] for rank, one in enumerate(facts) if what in one}
        first, expected = next(iter(values.items()))
        for rank, value in values.items():
            if value != expected:
                raise WorldError(
                    f"init: the workers disagree on {what}: rank {first} has {expected}, rank {rank} has {value}. "
                    f"{REMEDIES.get(what, SAME_INSTALLATION)}",
                    what=what,
                )


def facts_of_this_process() -> dict[str, str]:
    """Return the facts that the processes of an MPI job compare. Workers of one process need not compare them.

    Functions travel by name, and arrays by dtype, so the processes must have the same of both.
    """
    found = {
        "jdistgrad": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),  # code and pickles do not depend on the rest
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        COLLECTIVES: settings.collectives or "the job's choice",
        X64: str(jax.dtypes.canonicalize_dtype(np.float64) == np.float64),
    }
    for package in ("mpi4py", "mpi4jax"):  # without mpi4jax, compiled programs reduce in another way
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    script = pathlib.Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    if settings.same_script and script.is_file():  # a notebook and the like have none
        found[SCRIPT] = f"{script.name} (sha256 {hashlib.sha256(script.read_bytes()).hexdigest()[:12]})"
    if "PYTEST_CURRENT_TEST" in os.environ:
        found[TEST] = os.environ["PYTEST_CURRENT_TEST"]
    return found


def name_of(names: Names, rank: int, size: int) -> str:
    """Return the name of the worker of a rank. It can stand in a message and on a command line.

    Arguments:
      names: the name, in which ``{rank}`` stands for the rank; the names of all ranks; a function of the rank; or None.
    """
    name: Any = names
    if names is None:
        name = f"worker{rank}"
    elif isinstance(names, str):
        name = names.replace("{rank}", str(rank))
    elif callable(names):
        name = names(rank)
    elif isinstance(names, list | tuple):
        if len(names) != size:
            raise ValueError(f"init: there are {len(names)} names for {size} workers. Give one for each rank.")
        name = names[rank]
    if isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name.isprintable() and " " not in name:
        return name
    raise ValueError(
        f"init: a worker's name is a string of 1 to {LONGEST_NAME} printable characters without spaces, not "
        f"{reprlib.repr(name)}. Leave name out for worker0, worker1, ..."
    )
