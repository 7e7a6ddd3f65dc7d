"""``save`` and ``restore``: the checkpoint of a whole job.

To save, every worker writes its parts, then the leader gives the checkpoint its name. Leaves that all callers have
alike are the leader's part; leaves that each has for itself, a part of each. A reference's value is a part, and what an
owner keeps of an optimizer.
"""

import operator
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Sequence
from typing import Any

from jdistgrad.errors import CheckpointError, WorkerLostError
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving import files
from jdistgrad.saving.callers import Job, call_each, raise_failed, together
from jdistgrad.saving.marks import replaced
from jdistgrad.saving.owners import Work, write_works
from jdistgrad.saving.reading import put_back, read

AnyPath = str | os.PathLike[str]

FORMAT = 1

ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:/")  # of gs://bucket/folder a pathlib.Path makes gs:/bucket/folder


def save(
    path: AnyPath,
    step: int,
    trees: Any = None,
    optimizers: Any = None,
    *,
    keep: float = 3,
    workers: Sequence[int] | None = None,
) -> None:
    """Write a checkpoint of the whole job: ``path/step``, which appears there when it is complete.

    Every worker calls it that has not called ``shutdown``: all ranks of a program in which all do the same, the driver
    alone where the others serve. They wait for each other. Values of references and states of optimizers are written by
    their owners, all else by the first of the callers, for all of them; mark what each has for itself: ``per_worker``,
    ``sharded``. The path is on a disk that all workers see, and belongs to one job at a time.

    Arguments:
      path: the folder of the job's checkpoints.
      step: the number of steps that have been made.
      trees: any tree of arrays, random keys, numbers, strings, references, remote modules and marks.
      optimizers: any tree of ``DistributedOptimizer``. It need not be in ``trees`` what they optimize.
      keep: how many steps' checkpoints to keep, those saved last, whatever their steps; the others are removed.
        ``math.inf``: all steps'.
      workers: the ranks of the workers that save together, if they are not those that have not called ``shutdown``.

    Raises:
      CheckpointError: a worker could not write its part; on every worker that called. The last complete checkpoint is
        still there, and will be restored.
      DisagreementError: the callers have different trees.
      MissingRanksError: a worker did not come to save within five minutes.
      WorkerLostError: a worker died or stands still. In a job that survives, those that are lost before all have come
        are left out.

    Example:
      >>> step, params = jd.restore(folder, params, optimizer)    # 0 and the given ones if there is no checkpoint
      >>> for step in range(step, 300):
      ...     params = train(params)
      ...     if step % 100 == 99:
      ...         jd.save(folder, step + 1, params, optimizer)
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"save(path, step, trees): step must be a number of steps, 0 or more, not {step!r:.60}")
    if not keep >= 1:
        raise ValueError(f"save: keep must be a number of checkpoints, 1 or more, or math.inf for all, not {keep!r}")
    folder = _folder("save", path)
    with together(f"save({str(path)!r}, {number})", folder, trees, optimizers, workers) as job:
        job.agree(lambda: _write(job, folder, number, keep) if job.leads else None)


# By folder: a save removes what it finds half written there, so it waits for one that another worker has begun.
_writing: dict[pathlib.Path, threading.Lock] = {}


def _write(job: Job, path: pathlib.Path, step: int, keep: float) -> None:
    """Write a checkpoint. If that fails anywhere, nothing of it is left."""
    files.orbax()
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, "places": job.plans[job.leader].places}
    manifest |= {"workers": list(job.plans), "size": current_worker().size}
    with _writing.setdefault(path, threading.Lock()):
        try:
            folder = files.begin(path, step)
            try:
                files.publish(folder, step, {**manifest, "parts": _written(job, folder, step)})
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        except WorkerLostError:  # an OSError too
            raise
        except OSError as error:
            raise_failed(current_worker().info, error, *_not_written(path, step, current_worker().info))
        files.remove_all_but(path, keep)


def _written(job: Job, folder: pathlib.Path, step: int) -> dict[str, Any]:
    """Let all workers write; return the entries of their parts. Waits for all of them, also if some fail."""
    asked: dict[int, list[Work]] = {caller: [] for caller in job.plans}
    for caller, plan in job.plans.items():
        for rank, works in plan.asked.items():
            asked.setdefault(rank, []).extend(work for work in works if work.own or caller == job.leader)
    attempts, callers = {caller: plan.attempt for caller, plan in job.plans.items()}, list(job.plans)
    arguments = [
        (rank, (str(folder / f"rank{rank}"), works, attempts.get(rank), callers))
        for rank, works in asked.items()
        if works or rank in attempts
    ]
    written, failed = call_each(write_works, arguments)
    if failed is not None:
        raise_failed(*failed, *_not_written(folder.parent, step, failed[0]))
    parts: dict[str, Any] = {}
    for (rank, (there, *_)), entries in zip(arguments, written, strict=True):
        has_files = any("at" in leaf for entry in entries.values() for leaf in entry["leaves"].values())
        if has_files and not pathlib.Path(there).is_dir():  # each machine has a disk of its own under this path
            worker, here = current_worker().directory.workers[rank], current_worker().info
            raise CheckpointError(
                f"save: {worker} has written {there}, but {here} does not see it. Save on a disk that all workers see."
            )
        parts |= entries
    return parts


def _not_written(path: pathlib.Path, step: int, worker: WorkerInfo) -> tuple[str, str]:
    """Return what has failed, and what is left."""
    there = files.complete(path)
    left = f"The checkpoint of step {there[-1][0]} is still complete." if there else "There is no other checkpoint."
    return f"save: {worker} could not write its part of step {step} in {path}", left


def restore(
    path: AnyPath,
    trees: Any = None,
    optimizers: Any = None,
    *,
    step: int | None = None,
    workers: Sequence[int] | None = None,
) -> tuple[int, Any]:
    """Restore the checkpoint that was saved last: return its step, and the trees with the values that were saved.

    The callers are those of ``save``, with trees and optimizers of the same structure, as freshly initialized. The job
    may have another number of workers, and references other owners: what belongs together is found by its place in the
    trees. Values of references and states of optimizers are put back on their owners; the references stay. Marks are
    left out of the returned trees.

    If there is no checkpoint, the step is 0, and the trees and optimizers are left as they are, so that one program
    both starts and resumes.

    Arguments:
      path, trees, optimizers, workers: as for ``save``.
      step: the step to restore; default that of the checkpoint that was saved last.

    Raises:
      CheckpointError: a leaf is missing, or has another shape or dtype; the message names it. Or files are damaged.
        Nothing was restored on any worker.

    Example:
      >>> step, (params, key) = jd.restore(folder, (params, jd.per_worker(key)), optimizer)
    """
    number = None if step is None else operator.index(step)
    folder = _folder("restore", path)
    files.orbax()
    asked = "" if number is None else f", step={number}"
    with together(f"restore({str(path)!r}{asked})", folder, trees, optimizers, workers) as job:
        chosen = job.agree(lambda: _chosen(folder, number) if job.leads else None, everybody=True)[job.leader]
        if chosen is None:
            return 0, replaced(trees, iter([leaf.given for leaf in job.of_trees]))
        saved, prepared, found = job.agree(lambda: read(job, chosen))
        job.agree(lambda: put_back(prepared))
        return saved, replaced(trees, iter(found))


def _folder(what: str, path: AnyPath) -> pathlib.Path:
    if ADDRESS.match(str(path)):
        raise ValueError(
            f"{what}: {path} is an address, expected a folder on a disk that all workers see, such as one in which the "
            "storage is mounted"
        )
    folder = pathlib.Path(path).resolve()
    if "\\" in str(folder) and os.sep != "\\":
        raise ValueError(f"{what}: {folder} has a backslash, which the files' format takes for a slash")
    return folder


def _chosen(path: pathlib.Path, step: int | None) -> str | None:
    """Return the folder of the checkpoint to restore; None if there is none yet."""
    if path.is_file():
        raise CheckpointError(f"restore: {path} is a file. Give the folder in which save made the checkpoints.")
    found = files.complete(path)
    if not found and files.COMPLETE.fullmatch(path.name) and (path / files.MANIFEST).is_file():
        raise CheckpointError(
            f"restore: {path} is one checkpoint. Give the folder that it is in, {path.parent}, and its step: "
            f"step={path.name.partition('-')[0]}"
        )
    if step is None:
        return str(found[-1][1]) if found else None
    of_step = [folder for number, folder in found if number == step]
    if not of_step:
        there = ", ".join(str(number) for number, _ in found) or "none"
        raise CheckpointError(f"restore: there is no complete checkpoint of step {step} in {path}; there are: {there}")
    return str(of_step[-1])
