"""``save`` and ``restore``: the checkpoint of a whole job.

To save, every worker writes its parts, then the leader gives the checkpoint its name. The leader's part has the leaves
that are the same on all callers; each caller's part, its own leaves. A reference's value is a part of its owner, and so
are an owner's values and state of an optimizer.
"""

import operator
import os
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any

from jdistgrad.errors import CheckpointError
from jdistgrad.rpc.functions import Args
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving import files
from jdistgrad.saving.callers import Job, ask_each, together
from jdistgrad.saving.marks import replaced
from jdistgrad.saving.owners import by_owner, held_parts, prepare, write
from jdistgrad.saving.reading import Reader, held_leaves, predecessors

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
    """Write a checkpoint of the whole job, ``path/step``, which appears there when it is complete.

    All workers that have not called ``shutdown`` must call it: all ranks of an SPMD program, or the driver alone where
    the others serve. They wait for each other. Owners write the values of references and the states of optimizers; the
    first caller writes all other leaves, for all callers. Mark trees that differ between callers: ``per_worker``,
    ``sharded``. The path must be on a disk that all workers see, and belongs to one job at a time.

    Arguments:
      path: the folder of the job's checkpoints.
      step: the number of steps that have been made.
      trees: any tree of arrays, random keys, numbers, strings, references, remote modules and marks.
      optimizers: any tree of ``DistributedOptimizer``. Their parameters need not be in ``trees``.
      keep: how many steps to keep: those saved last, whatever their numbers. ``math.inf`` keeps all.
      workers: the ranks of the callers; default all workers that have not called ``shutdown``.

    Raises:
      CheckpointError: a worker could not write its part; on every worker that called. The last complete checkpoint is
        still there, and will be restored.
      DisagreementError: the callers have different trees.
      MissingRanksError: a worker did not come to save within five minutes.
      WorkerLostError: a worker died or hangs. In a job that survives, workers that are lost before all have come are
        left out.

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
        _write(job, folder, number, keep)


def _write(job: Job, path: pathlib.Path, step: int, keep: float) -> None:
    """Write a checkpoint. If that fails anywhere, nothing of it is left."""
    before = files.complete(path)
    left = f"The checkpoint of step {before[-1][0]} is still complete." if before else "There is no other checkpoint."
    folder = pathlib.Path(job.lead(lambda: str(files.begin(path, step))))
    try:
        written = job.agree_all(lambda: _written(job, folder, f"write its part of step {step} in {path}", left))
        parts = {name: entry for entries in written for name, entry in entries.items()}
        job.lead(lambda: _publish(job, folder, step, parts))
    except BaseException:
        if job.leads:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    job.lead(lambda: files.remove_all_but(path, keep))


def _written(job: Job, folder: pathlib.Path, do: str, left: str) -> dict[str, Any]:
    """Write this caller's parts; let owners that do not call write, if it leads. Return the parts' entries."""
    files.orbax()
    me = current_worker()
    of_all = ((caller, work) for caller, works in job.works.items() for work in works)
    asked = by_owner((work.part(caller), work) for caller, work in of_all if work.own or caller == job.callers[0])
    mine = asked.get(me.rank, [])
    others: dict[int, Args] = {
        rank: (str(folder / f"rank{rank}"), parts, {})
        for rank, parts in asked.items()
        if job.leads and rank not in job.callers
    }

    def own() -> dict[str, Any]:
        return write(str(folder / f"rank{me.rank}"), mine, held_parts(job.leaves, job.callers))

    written = ask_each(write, others, "save", do, left, own=own)
    return {name: entry for entries in written.values() for name, entry in entries.items()}


def _publish(job: Job, folder: pathlib.Path, step: int, parts: dict[str, Any]) -> None:
    for entry in parts.values():
        has_files = any("at" in leaf for leaf in entry["leaves"].values())
        if has_files and not (folder / entry["folder"]).is_dir():  # each machine has a disk of its own under this path
            raise CheckpointError(
                f"save: {folder / entry['folder']} was written, but {current_worker().info} does not see it. Save on a "
                "disk that all workers see."
            )
    manifest = {"format": FORMAT, "step": step, "places": job.places, "workers": job.callers, "parts": parts}
    files.publish(folder, step, {**manifest, "size": current_worker().size})


def restore(
    path: AnyPath,
    trees: Any = None,
    optimizers: Any = None,
    *,
    step: int | None = None,
    workers: Sequence[int] | None = None,
) -> tuple[int, Any]:
    """Restore the checkpoint that was saved last: return its step, and the trees with the saved values.

    The callers are those of ``save``, with trees and optimizers of the same structure, as freshly initialized. The job
    may have another number of workers, and references other owners: leaves are found by their path in the trees. Values
    of references and states of optimizers are put back on their owners; the references stay. The returned trees have no
    marks.

    If there is no checkpoint, the step is 0, and trees and optimizers stay as they are: the same program both starts
    and resumes.

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
        chosen = job.lead(lambda: _chosen(folder, number))
        if chosen is None:
            return 0, replaced(trees, iter([leaf.given for leaf in job.in_trees]))
        saved, found, prepared = job.agree(lambda: _read(job, chosen, whole=optimizers is not None))
        left = "Other workers may have put back theirs: call restore again before you go on."
        job.lead(lambda: ask_each(operator.call, prepared, "restore", "put back its part", left) and None)
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


def _read(job: Job, folder: str, *, whole: bool) -> tuple[int, list[Any], dict[int, Args]]:
    """Return the checkpoint's step, the leaves of this caller's trees and, from the leader, what owners have prepared.

    All of it is compared before any is put back.
    """
    reader, what = Reader(folder), f"restore of {folder}"
    places = set(job.places)
    for place in reader.manifest["places"]:  # optimizers may be left out altogether
        if place not in places and (whole or place.startswith("trees")):
            raise CheckpointError(f"{what}: {place} was saved, but is not asked for. Give trees of the same structure.")
    of_callers = predecessors(job.callers, current_worker().size, reader.manifest)
    prepared: dict[int, Args] = {}
    if job.leads:
        of_all = ((of_callers[caller], work) for caller, works in job.works.items() for work in works)
        asked = by_owner((work.part(was), work) for was, work in of_all if not (work.own and was is None))
        arguments = {owner: (folder, parts) for owner, parts in asked.items()}
        left = "Nothing was restored on any worker."
        ready = ask_each(prepare, arguments, what, "prepare its part", left, stays=True)
        prepared = {owner: (one,) for owner, one in ready.items()}
    held = held_leaves(reader, job.leaves, of_callers)
    return int(reader.manifest["step"]), [held.get(leaf.place, leaf.given) for leaf in job.in_trees], prepared
