"""A batch: the programs of some seeds, one after the other, in one process or MPI job. Each process writes notes.

``torture.watching`` starts batches, reads their notes and ends a batch that stands still. Before that it requests the
stacks of all threads by a signal: the handler writes them without the GIL, whichever thread holds it.
"""

import argparse
import faulthandler
import json
import os
import pathlib
import signal
from collections.abc import Sequence
from typing import Any, TextIO

import jax

import jdistgrad as jd
from jdistgrad.wire import launcher_env
from torture import checking, generator, judging

CORES = 2  # XLA has one thread per core: with only two, programs that block threads are found


class Notes:
    """The notes of one process, line by line: each program that begins, and how it ended."""

    def __init__(self, folder: pathlib.Path, rank: int):
        self._file: TextIO = (folder / f"notes-{rank}").open("w")
        self._stacks: TextIO = (folder / f"stacks-{rank}").open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks)
        self.write(process=os.getpid())

    def write(self, **entry: Any) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0, help="of a local world; 0: the ranks of this job")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], required=True)
    parser.add_argument("--features", type=lambda text: text.split(","), required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--x64", action="store_true")
    parser.add_argument("--devices", type=int, default=1)
    return parser.parse_args(arguments)


def main(chosen: argparse.Namespace) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    jax.config.update("jax_enable_x64", chosen.x64)
    if chosen.workers:
        jax.config.update("jax_num_cpu_devices", chosen.devices)
    notes = Notes(chosen.folder, launcher_env.rank() if launcher_env.launched() else 0)
    for seed in chosen.seeds:
        notes.write(begins=seed)
        problems = run(generator.draw(seed, chosen.features), chosen.workers, chosen.limit / 3)
        notes.write(ends=seed, problems=problems)


def run(program: Any, workers: int, timeout: float) -> list[Any]:
    """Run a program; return its problems on this rank, or on all workers of a local world."""
    if not workers:
        return checking.check(program, timeout)
    try:
        found = jd.spawn(checking.check, workers, args=(program, timeout))
    except Exception as error:
        return [judging.failure(error)]
    return [problem for problems in found for problem in problems]


if __name__ == "__main__":
    main(options())
