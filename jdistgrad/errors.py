"""Every exception the package raises.

Each message says what was attempted, where, what was expected and what was found, and how to mend it. The facts
stand as attributes too (``worker``, ``call``, ``seconds`` ...), and they survive pickling.
"""

from typing import Any


class DistgradError(Exception):
    """Base of every exception of this package; keyword arguments become attributes."""

    def __init__(self, message: str, **fields: Any):
        super().__init__(message)
        self.__dict__.update(fields)


class NotInitializedError(DistgradError, RuntimeError):
    """Something needed a world, and this thread has none (before ``init`` or after ``shutdown``)."""


class AlreadyInitializedError(DistgradError, RuntimeError):
    """``init`` was called in a world that is already open."""


class WorldError(DistgradError, RuntimeError):
    """The workers could not form a world: one is missing, or they disagree."""


class DuplicateNameError(WorldError, ValueError):
    """Two workers asked for the same name."""


class UnknownWorkerError(DistgradError, LookupError):
    """A call named a worker that is not in this world."""


class FunctionError(DistgradError, TypeError):
    """A function cannot be called remotely: the other side could not find it."""


class EncodingError(DistgradError, TypeError):
    """A value cannot be sent to another worker, or could not be rebuilt there."""


class WireError(DistgradError, RuntimeError):
    """Bytes arrived that are not a message of this package, or not the whole of one.

    ``kind`` and ``id`` say which message, where that much could be read.
    """

    kind: Any = None
    id: int | None = None


class CallTimeoutError(DistgradError, TimeoutError):
    """A call, or the wait for one, took longer than it was given."""


class RemoteError(DistgradError, RuntimeError):
    """A remote function raised an exception whose type cannot be rebuilt on this worker."""


class WorkerLostError(DistgradError, ConnectionError):
    """A worker died, left or stopped answering while something waited for it."""


class WorldClosedError(DistgradError, RuntimeError):
    """The world was shut down under a call that was still in flight."""


class NotOwnerError(DistgradError, RuntimeError):
    """``local_value`` was asked of a worker that does not own the reference."""


class StaleReferenceError(DistgradError, RuntimeError):
    """A reference was used after its world closed, or in a world it does not belong to."""


class ContextError(DistgradError, RuntimeError):
    """A context was used after it closed, where it is not known, or inside another one; or one is missing."""


class DifferentiationError(DistgradError, TypeError):
    """What was asked of a derivative across workers cannot be had: forward mode, a root that is no scalar ..."""


class LauncherError(DistgradError, RuntimeError):
    """The command line could not start a job (no MPI, no such script, bad number of workers)."""


class TimelineError(DistgradError, RuntimeError):
    """A timeline could not be recorded, read, merged or drawn."""


class CollectiveError(DistgradError, RuntimeError):
    """A collective operation could not be carried out, or was used where it has no meaning."""


class MissingRanksError(CollectiveError, TimeoutError):
    """Some ranks did not come to a step that others have taken; ``missing`` names them."""

    missing: list[int]


class DisagreementError(CollectiveError, ValueError):
    """The ranks do not do the same: other leaves, other settings, another step. Nothing was reduced."""


class LeafError(DistgradError, TypeError):
    """A leaf of a tree is of a kind that cannot be averaged, or was given twice; ``path`` names it."""


class HookError(DistgradError, TypeError):
    """A communication hook returned something that is not its bucket, reduced."""


class NonFiniteError(DistgradError, ArithmeticError):
    """A gradient held NaN or infinity when asked to check; ``rank`` and ``path`` say where."""
