"""The folders of checkpoints: a checkpoint appears under its name when it is complete, by one rename.

``path/120`` is the checkpoint of step 120; ``path/120-1`` the next one of the same step, which was saved again before
the first was removed. Names that begin with a point are of checkpoints that are being written or removed.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import uuid
from typing import Any

MANIFEST = "manifest.json"

COMPLETE = re.compile(r"(\d+)(?:-(\d+))?")
WRITING, REMOVING = ".saving-", ".removing-"

Folder = pathlib.Path


def complete(path: Folder) -> list[tuple[int, Folder]]:
    """Return the complete checkpoints with their steps, the last one last."""
    if not path.is_dir():
        return []
    found = [(match, one) for one in path.iterdir() if (match := COMPLETE.fullmatch(one.name))]
    ordered = sorted((int(match[1]), int(match[2] or 0), one) for match, one in found)
    return [(step, one) for step, _, one in ordered if (one / MANIFEST).is_file()]


def begin(path: Folder, step: int) -> Folder:
    """Make the folder in which a checkpoint is written. What broken attempts have left behind is removed first."""
    path.mkdir(parents=True, exist_ok=True)
    for left in [one for one in path.iterdir() if one.name.startswith((WRITING, REMOVING))]:
        shutil.rmtree(left, ignore_errors=True)
    folder = path / f"{WRITING}{step}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return folder


def publish(folder: Folder, step: int, manifest: dict[str, Any]) -> Folder:
    """Write the manifest and give the folder its name: from here on the checkpoint is complete."""
    (folder / MANIFEST).write_text(json.dumps(manifest))
    synchronize(folder / MANIFEST)
    synchronize(folder)
    taken = {one.name for one in folder.parent.iterdir()}
    names = (str(step) if again == 0 else f"{step}-{again}" for again in range(len(taken) + 1))
    final = folder.with_name(next(name for name in names if name not in taken))
    folder.rename(final)
    synchronize(final.parent)
    return final


def read_manifest(folder: Folder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return found


def remove_all_but(path: Folder, keep: int) -> None:
    """Remove all complete checkpoints but the last ones. Each is renamed first: half of one must not look whole."""
    found = complete(path)
    latest = dict(found)  # of several of one step the last
    kept = set(list(latest.values())[-keep:])
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
