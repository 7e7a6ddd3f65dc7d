"""The writing of a checkpoint by its leader: every worker writes its parts, then the checkpoint gets its name."""

import functools
import pathlib
import shutil
import threading
from collections.abc import Mapping
from typing import Any

from jdistgrad.errors import CheckpointError, WorkerLostError
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.serving.failures import in_short
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving import files, folders
from jdistgrad.saving.callers import Job, call_each
from jdistgrad.saving.owners import write_works
from jdistgrad.saving.parts import Plan, of_all

FORMAT = 1

# By folder: a save removes what it finds half written there, so it waits for one that another thread has begun.
_writing: dict[pathlib.Path, threading.Lock] = {}


def write(job: Job, plans: Mapping[int, Plan], path: pathlib.Path, step: int, keep: float) -> None:
    """Write a checkpoint. If that fails anywhere, nothing of it is left."""
    files.orbax()
    asked = of_all(plans, job.leader)
    who = {"workers": job.callers, "size": current_worker().size}
    manifest = {"format": FORMAT, "step": step, **who, "places": plans[job.leader].places}
    with _writing.setdefault(path, threading.Lock()):
        try:
            _publish(path, step, manifest, asked)
        except WorkerLostError:  # an OSError too
            raise
        except OSError as error:
            raise CheckpointError(_not_written(path, step, current_worker().info, in_short(error))) from error
        folders.remove_all_but(path, keep)


def _publish(path: pathlib.Path, step: int, manifest: Mapping[str, Any], asked: Mapping[int, Any]) -> None:
    folder = folders.begin(path, step)
    try:
        folders.publish(folder, step, {**manifest, "parts": _written(folder, step, asked)})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _written(folder: pathlib.Path, step: int, asked: Mapping[int, Any]) -> dict[str, Any]:
    """Let all workers write; return the entries of their parts. Waits for all of them, also if some fail."""
    arguments = [(rank, (str(folder / f"rank{rank}"), works)) for rank, works in asked.items()]
    written = call_each(write_works, arguments, functools.partial(_not_written, folder.parent, step))
    parts: dict[str, Any] = {}
    for rank, entries in zip(asked, written, strict=True):
        if any("at" in leaf for entry in entries.values() for leaf in entry["leaves"].values()):
            _check_seen(folder / f"rank{rank}", rank)
        parts |= entries
    return parts


def _check_seen(folder: pathlib.Path, rank: int) -> None:
    """Raise if another worker's files are not here: each machine has a disk of its own under this path."""
    if not folder.is_dir():
        worker, here = current_worker().directory.workers[rank], current_worker().info
        raise CheckpointError(
            f"save: {worker} has written {folder}, but {here} does not see it. Save on a disk that all workers see."
        )


def _not_written(path: pathlib.Path, step: int, worker: WorkerInfo, why: str) -> str:
    there = folders.complete(path)
    left = f"The checkpoint of step {there[-1][0]} is still complete" if there else "There is no other checkpoint"
    return f"save: {worker} could not write its part of step {step} in {path}: {why}. {left}."
