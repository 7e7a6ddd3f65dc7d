"""The program of jobs in which faults do not end a rank: every rank injects, judges, and writes down the same faults.

Each module that has such faults offers ``play(chance, count)``, which yields, on every rank, an outcome for each fault.
"""

import argparse
import dataclasses
import faulthandler
import gc
import importlib
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from torture import watching

import jdistgrad as jd
from faults import jobs
from faults.outcomes import GOOD, HUNG, NAMED, SURVIVED, WRONG, Outcome
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire import launcher_env
from jdistgrad.wire.message import spell

TO_WRITE, TO_CLOSE = 1.0, 10.0


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    return parser.parse_args(arguments)


def main(chosen: argparse.Namespace) -> None:
    rank = launcher_env.rank()
    faulthandler.register(signal.SIGUSR1, file=(chosen.folder / f"stacks-{rank}").open("w"))
    play = importlib.import_module(chosen.module).play
    with (chosen.folder / f"notes-{rank}").open("w") as notes:
        for outcome in play(random.Random(chosen.seed), chosen.count):
            notes.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            notes.flush()


def run(
    n: int, module: str, count: int, seed: int, *, limit: float, settings: Mapping[str, str] | None = None
) -> Iterator[Outcome]:
    """Run a module's faults on ``n`` ranks. A job in which nothing happens for ``limit`` seconds hangs."""
    with tempfile.TemporaryDirectory() as name:
        folder, mark = pathlib.Path(name), name
        asked = [module, "--count", str(count), "--seed", str(seed), "--folder", name]
        command = [sys.executable, "-m", "jdistgrad", "run", "-n", str(n), "-m", "faults.program", *asked]
        with (folder / "output").open("w") as output:
            job = subprocess.Popen(
                command,
                env=jobs.environment(mark, settings or {}),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status = watching.watch(job, folder, limit)
                if status is None:
                    ask_for_stacks(mark)
            finally:
                watching.end(job)
                jobs.end_all(mark)
        yield from gathered(folder, n, count, status, " ".join([module, f"seed {seed}"]))


def ask_for_stacks(mark: str) -> None:
    jobs.send(mark, signal.SIGUSR1, only=b"faults.program")
    time.sleep(TO_WRITE)


def gathered(folder: pathlib.Path, n: int, count: int, status: int | None, fault: str) -> Iterator[Outcome]:
    """Yield an outcome for each fault from the notes of all ranks, and one for what ended the job before its time."""
    notes = [[Outcome(**entry) for entry in watching.notes(folder / f"notes-{rank}")] for rank in range(n)]
    done = min(map(len, notes))
    for k in range(done):
        yield joined([of_rank[k] for of_rank in notes])
    if status != 0 or done < count:
        stacks = "\n".join(f"{path.name}\n{path.read_text()}" for path in sorted(folder.glob("stacks-*")))
        output = (folder / "output").read_text(errors="replace")
        text = f"the job ended with status {status} after {done} of {count}\n{output[-4000:]}\n{stacks[-8000:]}"
        yield Outcome(HUNG if status is None else WRONG, fault, text)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of one fault from what every rank saw of it: the worst decides."""
    by_kind = {one.kind: one for one in reversed(outcomes)}
    found = next(by_kind[kind] for kind in (HUNG, WRONG, NAMED, SURVIVED) if kind in by_kind)
    if found.kind in GOOD:
        return found
    text = "\n".join(f"rank {rank}: {one.kind} {one.text}" for rank, one in enumerate(outcomes))
    return dataclasses.replace(found, text=text)


def driven(count: int, drive: Callable[[], Iterator[Outcome]]) -> Iterator[Outcome]:
    """Let worker 0 inject the faults while the others serve. What they see of the faults is nothing.

    The last outcome tells what any worker still holds when nobody uses it any more: values, calls, contexts.
    """
    me = jd.init(timeout=30)
    last = None
    for one in drive() if me.rank == 0 else (judged("served", "", named=False) for _ in range(count)):
        if last is not None:
            yield last
        last = one
    del one
    left = contexts_left() if me.rank == 0 else []
    left += jd.shutdown()
    if last is not None:
        yield last if not left else dataclasses.replace(last, kind=WRONG, text=f"{last.text} At the end: {left}")


def contexts_left() -> list[str]:
    """Return the contexts that some worker still knows, once those that are being closed have been closed."""
    deadline = time.monotonic() + TO_CLOSE
    while (found := jd.rpc_all(None, contexts).result()) != [[]] * jd.world_size() and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"context {spell(one)} on worker {rank}" for rank, those in enumerate(found) for one in those]


def contexts() -> list[int]:
    gc.collect()  # of contexts that were abandoned
    return list(current_worker().scopes.identifiers())


def judged(fault: str, problem: str, *, named: bool) -> Outcome:
    """Return the outcome of a fault; ``problem`` is empty if what was promised has happened."""
    return Outcome(WRONG, fault, problem) if problem else Outcome(NAMED if named else SURVIVED, fault)


if __name__ == "__main__":
    main(options())
