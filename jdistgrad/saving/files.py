"""Arrays in files, by orbax. Each worker writes and reads alone: orbax must not wait for other processes.

Among several processes of ``jax.distributed``, orbax (0.12) writes arrays that belong to one process from process 0
only. There, other workers send theirs to worker 0.
"""

import contextlib
import logging
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jdistgrad.errors import CheckpointError
from jdistgrad.rpc import api
from jdistgrad.saving import folders

Arrays = dict[str, np.ndarray]

SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")  # in the text of tensorstore's errors, such as that of a full disk

WRITER = 0  # the worker that is process 0 of jax.distributed


def orbax() -> Any:
    """Import orbax, which takes half a second."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise CheckpointError("save and restore need orbax: pip install 'jdistgrad[checkpoints]'") from error
    return orbax.checkpoint


def write(folder: pathlib.Path, arrays: Arrays) -> None:
    """Write arrays into a new folder; return when they are on the disk."""
    orbax()
    if not arrays:
        return
    if jax.process_count() > 1 and jax.process_index() != 0:
        api.rpc_sync(WRITER, write_here, (str(folder), arrays), timeout=float("inf"))
    else:
        write_here(str(folder), arrays)


def write_here(folder: str, arrays: Arrays) -> None:
    ocp = orbax()
    try:
        # Random bits, as weights are, only take time to compress.
        with _quiet(), _checkpointer(use_compression=False) as files:
            files.save(folder, args=ocp.args.PyTreeSave(arrays))
    except ValueError as error:
        number = SYSTEM_ERROR.search(str(error))
        raise error if number is None else OSError(int(number[1]), os.strerror(int(number[1])), folder) from error
    folders.synchronize_all(pathlib.Path(folder))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Open a block in which orbax does not log its threads' tracebacks, a hundred lines: it raises the error too.

    Several workers of a process may be in such blocks: each has a filter of its own.
    """
    log, own = logging.getLogger("absl"), _IsNotRaisedToo()
    log.addFilter(own)
    try:
        yield
    finally:
        log.removeFilter(own)


class _IsNotRaisedToo(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "_SignalingThread.run() raised" not in str(record.msg)


def read(folder: pathlib.Path, names: Iterable[str]) -> Arrays:
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
