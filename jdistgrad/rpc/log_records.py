"""The fields of this package's log records that say where they come from: ``rank``, ``worker`` and ``context``."""

import logging

from jdistgrad.rpc import current
from jdistgrad.wire.ids import spell

LOGGERS = tuple(f"jdistgrad.{name}" for name in ("data_parallel", "ffi", "rpc", "saving", "threads", "wire"))


def add_fields(record: logging.LogRecord) -> bool:
    """Add the fields to a record: None where the record's thread belongs to no worker, or is in no context."""
    worker, scope = current.find_resident(), current.current_scope()
    info = getattr(worker, "info", None)
    record.rank, record.worker = (None, None) if info is None else (info.rank, info.name)
    record.context = None if scope is None else spell(scope.id)
    return True


def install() -> None:
    """Let the records of this package have the fields from now on. To install twice is to install once."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(add_fields)
