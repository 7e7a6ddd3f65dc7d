"""The files and folders of checkpoints: a checkpoint appears under its name when it is complete, by one rename.

``path/120`` is the checkpoint of step 120; ``path/120-1`` the next one of the same step, which was saved again before
the first was removed. Their manifests number them in the order in which they were published: the last one counts,
since a job may go back to an earlier step. Names that begin with a point are of checkpoints that are being written or
removed.

Arrays are in files of orbax. Each worker writes and reads alone: orbax must not wait for other processes. In a job of
``jax.distributed``, orbax (0.12) writes arrays that belong to one process from process 0 only: there, other workers
send theirs to worker 0.
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jdistgrad.errors import CheckpointError
from jdistgrad.rpc import api

MANIFEST = "manifest.json"

COMPLETE = re.compile(r"(\d+)(?:-\d+)?")
WRITING, REMOVING = ".saving-", ".removing-"

SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")  # in the text of tensorstore's errors, such as that of a full disk

Arrays = dict[str, np.ndarray]
Folder = pathlib.Path


def complete(path: Folder) -> list[tuple[int, Folder]]:
    """Return the complete checkpoints with their steps, the last published one last."""
    try:
        there = list(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # any other error may hide checkpoints
        return []
    found = []
    for one in there:
        if match := COMPLETE.fullmatch(one.name):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # incomplete, or just being removed
                found.append((read_manifest(one)["turn"], int(match[1]), one))
    return [(step, one) for _, step, one in sorted(found)]


def begin(path: Folder, step: int) -> Folder:
    """Make the folder in which a checkpoint is written. Remove those of attempts that failed."""
    path.mkdir(parents=True, exist_ok=True)
    for left in [one for one in path.iterdir() if one.name.startswith((WRITING, REMOVING))]:
        shutil.rmtree(left, ignore_errors=True)
    folder = path / f"{WRITING}{step}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return folder


def publish(folder: Folder, step: int, manifest: dict[str, Any]) -> None:
    """Write the manifest and give the folder its name: from here on the checkpoint is complete, and the last one."""
    path = folder.parent
    turn = 1 + max((read_manifest(last)["turn"] for _, last in complete(path)[-1:]), default=0)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "turn": turn}))
    synchronize(folder / MANIFEST)
    synchronize(folder)
    names = (f"{step}-{again}" if again else str(step) for again in itertools.count())
    folder.rename(next(path / name for name in names if not (path / name).exists()))
    synchronize(path)


def read_manifest(folder: Folder) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}. Remove that folder.") from error
    return found


def remove_all_but(path: Folder, keep: float) -> None:
    """Remove all complete checkpoints but those published last; of one step, the last counts.

    Each is renamed first: half of one must not look whole.
    """
    found = complete(path)
    last = dict(found)  # the last of each step
    steps = list(dict.fromkeys(step for step, _ in reversed(found)))
    kept = [last[step] for step in steps[: int(min(keep, len(steps)))]]
    for _, one in found:
        if one not in kept:
            hidden = one.with_name(f"{REMOVING}{one.name}")
            with contextlib.suppress(OSError):  # the next save tries again
                one.rename(hidden)
                shutil.rmtree(hidden)


def synchronize(path: Folder) -> None:
    """Return when a file, or the list of a folder, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def orbax() -> Any:
    """Import orbax, which takes half a second."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise CheckpointError("save and restore need orbax: pip install 'jdistgrad[checkpoints]'") from error
    return orbax.checkpoint


def write(folder: str, arrays: Arrays) -> None:
    """Write arrays into a new folder; return when they are on the disk."""
    if not arrays:
        return
    if jax.process_index() != 0:  # worker 0 is process 0
        api.rpc_sync(0, write, (folder, arrays), timeout=math.inf)
        return
    ocp = orbax()
    try:
        with _checkpointer(use_compression=False) as files:  # random bits, as weights are, only take time to compress
            files.save(folder, args=ocp.args.PyTreeSave(arrays))
    except ValueError as error:
        number = SYSTEM_ERROR.search(str(error))
        raise error if number is None else OSError(int(number[1]), os.strerror(int(number[1])), folder) from error
    for parent, _, names in os.walk(folder, topdown=False):
        for name in (*names, ""):
            synchronize(Folder(parent, name))


def read(folder: Folder, names: Iterable[str]) -> Arrays:
    """Read some of the arrays in a folder."""
    ocp, chosen = orbax(), sorted(names)
    if not chosen:
        return {}
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in chosen}
    wanted = ocp.args.PyTreeRestore(item=dict.fromkeys(chosen, 0), restore_args=how, partial_restore=True)
    with _checkpointer() as files:
        found: Arrays = files.restore(folder, args=wanted)
    return found


def _checkpointer(**settings: Any) -> Any:
    ocp, me = orbax(), jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"jdistgrad-{me}"
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=alone, **settings), multiprocessing_options=alone
    )
