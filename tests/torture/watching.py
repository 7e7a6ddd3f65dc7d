"""Batches of programs in processes of their own, watched, so that a hang costs only one program."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import jdistgrad
from jdistgrad.cli import launch
from torture import batch, generator, judging
from torture.judging import CRASH, HANG, MISMATCH, Problem
from torture.programs import ParallelProgram

TO_START = 120.0  # seconds in which a batch must have begun its first program
TOGETHER = 40  # programs per process: compiled code stays, and slows down the garbage collection
TO_WRITE = 1.0  # seconds for processes to write their stacks

# The settings of the process that runs a program, by its seed: whether floats have 64 bits, and the number of devices.
PLACES = ((False, 1), (True, 1), (False, 2), (True, 1))


@dataclasses.dataclass(frozen=True)
class World:
    """A kind of world to run programs in: ``local-3`` is three threads of one process, ``mpi-3`` three processes."""

    name: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(local|mpi)-[1-9]\d*", self.name):
            raise ValueError(f"a world is called local-3 or mpi-3, say, not {self.name!r}")

    @property
    def size(self) -> int:
        return int(self.name.partition("-")[2])

    @property
    def local(self) -> bool:
        return self.name.startswith("local")

    @property
    def writers(self) -> int:
        """Return the number of processes that write notes."""
        return 1 if self.local else self.size

    def command(self, arguments: Sequence[str]) -> list[str]:
        if self.local:
            return [sys.executable, "-m", "torture.batch", "--workers", str(self.size), *arguments]
        return launch.command(self.size, ["-m", "torture.batch", *arguments])

    def environment(self) -> dict[str, str]:
        here = [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(jdistgrad.__file__).parents[1])]
        given = {} if self.local else launch.surroundings(self.size, batch.CORES)
        paths = [*here, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**given, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of one program; ``kind`` is empty if there was no problem.

    Attributes:
      before: the seeds of the programs that ran before it in the same processes.
    """

    seed: int
    kind: str = ""
    text: str = ""
    before: tuple[int, ...] = ()


def verdicts(world: World, seeds: Sequence[int], features: Sequence[str], limit: float) -> Iterator[Verdict]:
    """Run all programs, in batches of equal process settings; a new batch follows one that stopped. Yield verdicts."""
    for place in dict.fromkeys(PLACES):
        left = [seed for seed in seeds if PLACES[seed % len(PLACES)] == place]
        while left:
            found = run_batch(world, left[:TOGETHER], features, limit, place)
            yield from found
            left = left[len(found) :]


def run_batch(
    world: World, seeds: Sequence[int], features: Sequence[str], limit: float, place: tuple[bool, int]
) -> list[Verdict]:
    """Run a batch; return the verdicts on its programs, up to the first that ended the process."""
    with tempfile.TemporaryDirectory() as name:
        folder, (x64, devices) = pathlib.Path(name), place
        listed = ["--seeds", ",".join(map(str, seeds)), "--features", ",".join(features)]
        where = ["--folder", name, "--limit", str(limit), "--devices", str(devices), *(["--x64"] if x64 else [])]
        status = watched(world, [*listed, *where], folder, limit)
        return judged(world, seeds, features, Ended(folder, status, world.writers))


def watched(world: World, arguments: Sequence[str], folder: pathlib.Path, limit: float) -> int | None:
    """Run a batch to its end; return its exit status, or None if it stood still and was ended."""
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            world.command(arguments), env=world.environment(), stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = watch(job, folder, limit)
            if status is None:
                ask_for_stacks(folder)
            return status
        finally:
            end(job)


def watch(job: subprocess.Popen, folder: pathlib.Path, limit: float) -> int | None:
    seen, patience, since = 0, TO_START, time.monotonic()
    while time.monotonic() - since < patience:
        status = job.poll()
        if status is not None:
            return status
        size = sum(path.stat().st_size for path in folder.glob("notes-*"))
        if size != seen:
            seen, patience, since = size, limit, time.monotonic()
        time.sleep(0.1)
    return None


def ask_for_stacks(folder: pathlib.Path) -> None:
    """Make each process of a batch write down the stacks of its threads."""
    for path in folder.glob("notes-*"):
        for entry in notes(path):
            if "process" in entry:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(entry["process"], signal.SIGUSR1)
    time.sleep(TO_WRITE)


def end(job: subprocess.Popen) -> None:
    """End all processes of a batch. mpirun ends its ranks on SIGTERM, so it gets time before SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is None:
            os.killpg(job.pid, number)
            try:
                job.wait(10)
            except subprocess.TimeoutExpired:
                continue


class Ended:
    """The remains of a batch: the notes of its processes, its output and its exit status."""

    def __init__(self, folder: pathlib.Path, status: int | None, writers: int):
        self.status = status
        self.output = (folder / "output").read_text(errors="replace")
        self.stacks = "\n".join(f"{path.name}\n{path.read_text()}" for path in sorted(folder.glob("stacks-*")))
        self._notes = [list(notes(folder / f"notes-{rank}")) for rank in range(writers)]

    def problems(self, seed: int) -> list[Problem]:
        """Return the problems that all processes found in a program."""
        entries = [entry for notes in self._notes for entry in notes if entry.get("ends") == seed]
        return [Problem(*problem) for entry in entries for problem in entry["problems"]]

    def finished(self, seed: int) -> bool:
        """Return whether every process finished a program."""
        return all(any(entry.get("ends") == seed for entry in notes) for notes in self._notes)


def notes(path: pathlib.Path) -> Iterator[dict]:
    """Yield a process's notes, without a last line that the end of the process has cut off."""
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            yield json.loads(line)


def judged(world: World, seeds: Sequence[int], features: Sequence[str], ended: Ended) -> list[Verdict]:
    found = []
    for k, seed in enumerate(seeds):
        finished = ended.finished(seed)
        one = verdict(seed, ended.problems(seed)) if finished else interrupted(world, seed, features, ended)
        found.append(dataclasses.replace(one, before=tuple(seeds[:k])))
        if not finished:
            break
    return found


def verdict(seed: int, problems: Sequence[Problem]) -> Verdict:
    """Return the verdict on a program; the worst problem decides its kind."""
    kind = next((kind for kind in (HANG, CRASH, MISMATCH) if any(one.kind == kind for one in problems)), "")
    return Verdict(seed, kind, "\n".join(one.text for one in problems))


def interrupted(world: World, seed: int, features: Sequence[str], ended: Ended) -> Verdict:
    """Return the verdict on a program during which its batch stood still or ended."""
    before = "\n".join(one.text for one in ended.problems(seed))
    if ended.status is None:
        return Verdict(seed, HANG, f"{before}\n{ended.stacks}\n{ended.output[-3000:]}")
    program = generator.draw(seed, features)
    odd = isinstance(program, ParallelProgram) and not program.agreed(world.size)
    if odd and not before and judging.names_an_error(ended.output):
        return Verdict(seed)  # the error has ended the job, and so has reached every rank
    return Verdict(seed, CRASH, f"{before}\nthe process ended with status {ended.status}\n{ended.output[-3000:]}")
