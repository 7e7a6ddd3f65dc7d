"""The folders of checkpoints: a checkpoint appears under its name when it is complete, by one rename.

``path/120`` is the checkpoint of step 120; ``path/120-1`` the next one of the same step, which was saved again before
the first was removed. Their manifests number them in the order in which they were published: the last one counts,
since a job may go back to an earlier step. Names that begin with a point are of checkpoints that are being written or
removed.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import uuid
from typing import Any

from jdistgrad.errors import CheckpointError

MANIFEST = "manifest.json"

COMPLETE = re.compile(r"(\d+)(?:-(\d+))?")
WRITING, REMOVING = ".saving-", ".removing-"

Folder = pathlib.Path


def complete(path: Folder) -> list[tuple[int, Folder]]:
    """Return the complete checkpoints with their steps, the last published one last."""
    found = []
    for named, one in _named(path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # incomplete, or just being removed
            found.append((_turn(one), *named, one))
    return [(step, one) for _, step, _, one in sorted(found)]


def _named(path: Folder) -> list[tuple[tuple[int, int], Folder]]:
    """Return the folders that have the name of a checkpoint, each with its step and its number among those of it."""
    try:
        there = list(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # any other error may hide checkpoints
        return []
    found = [(match, one) for one in there if (match := COMPLETE.fullmatch(one.name))]
    return [((int(match[1]), int(match[2] or 0)), one) for match, one in found]


def is_checkpoint(path: Folder) -> bool:
    """Return whether a folder is itself a complete checkpoint, as ``run/120`` is."""
    return COMPLETE.fullmatch(path.name) is not None and (path / MANIFEST).is_file()


def _turn(folder: Folder) -> int:
    """Return the number of a checkpoint in the order of publishing; 0 for one from before there were numbers."""
    return int(read_manifest(folder).get("turn", 0))


def begin(path: Folder, step: int) -> Folder:
    """Make the folder in which a checkpoint is written. What broken attempts have left behind is removed first."""
    path.mkdir(parents=True, exist_ok=True)
    for left in [one for one in path.iterdir() if one.name.startswith((WRITING, REMOVING))]:
        shutil.rmtree(left, ignore_errors=True)
    folder = path / f"{WRITING}{step}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return folder


def publish(folder: Folder, step: int, manifest: dict[str, Any]) -> Folder:
    """Write the manifest and give the folder its name: from here on the checkpoint is complete, and the last one."""
    path = folder.parent
    turn = 1 + max((_turn(one) for _, one in complete(path)), default=0)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "turn": turn}))
    synchronize(folder / MANIFEST)
    synchronize(folder)
    again = 1 + max((number for (other, number), _ in _named(path) if other == step), default=-1)
    final = path / (f"{step}-{again}" if again else str(step))
    folder.rename(final)
    synchronize(path)
    return final


def read_manifest(folder: Folder) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, expected an object")
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}. Remove that folder.") from error
    return found


def remove_all_but(path: Folder, keep: float) -> None:
    """Remove all complete checkpoints but those published last; of one step, the last counts.

    Each is renamed first: half of one must not look whole.
    """
    found = complete(path)
    last = dict(found)
    latest = [one for step, one in reversed(found) if one == last[step]]
    kept = set(latest[: int(min(keep, len(latest)))])
    for _, one in found:
        if one not in kept:
            hidden = one.with_name(f"{REMOVING}{one.name}")
            with contextlib.suppress(OSError):  # the next save tries again
                one.rename(hidden)
                shutil.rmtree(hidden)


def synchronize_all(folder: Folder) -> None:
    """Return when the files and folders below a folder are on the disk."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            synchronize(pathlib.Path(parent, name))
        synchronize(pathlib.Path(parent))


def synchronize(path: Folder) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
