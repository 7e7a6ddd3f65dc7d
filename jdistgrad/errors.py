"""The exceptions of this package.

Each message says what was attempted and where, what was expected and what was found, and what to do about it. The
facts are attributes too (``worker``, ``call``, ``seconds`` ...), which survive pickling.
"""

from typing import Any


class DistgradError(Exception):
    """Base of every exception of this package; keyword arguments become attributes."""

    def __init__(self, message: str, **fields: Any):
        super().__init__(message)
        self.__dict__.update(fields)


class NotInitializedError(DistgradError, RuntimeError):
    """An operation needed a world, and this thread has none (before ``init`` or after ``shutdown``)."""


class AlreadyInitializedError(DistgradError, RuntimeError):
    """``init`` was called in a world that is already open."""


class WorldError(DistgradError, RuntimeError):
    """The workers could not form a world: a worker is missing, or the workers disagree."""


class DuplicateNameError(WorldError, ValueError):
    """Two workers requested the same name."""


class UnknownWorkerError(DistgradError, LookupError):
    """A call named a worker that is not in this world."""


class FunctionError(DistgradError, TypeError):
    """A function cannot be called remotely: the other worker could not find it."""


class EncodingError(DistgradError, TypeError):
    """A value cannot be sent to another worker, or cannot be rebuilt there."""


class WireError(DistgradError, RuntimeError):
    """A message could not be sent."""


class CallTimeoutError(DistgradError, TimeoutError):
    """A call, or the wait for its result, exceeded its timeout."""


class RemoteError(DistgradError, RuntimeError):
    """A remote function raised an exception whose type cannot be rebuilt on this worker."""


class WorkerLostError(DistgradError, ConnectionError):
    """A worker died, left or stopped answering while something waited for it."""

    worker: Any = None


class WorldClosedError(DistgradError, RuntimeError):
    """The world was shut down while a call was still in flight."""


class NotOwnerError(DistgradError, RuntimeError):
    """``local_value`` was called on a worker that does not own the reference."""


class StaleReferenceError(DistgradError, RuntimeError):
    """A reference was used after its world closed or its value was freed, or in a world it does not belong to."""


class ContextError(DistgradError, RuntimeError):
    """A context was used after it closed, where it is unknown, or inside another context; or no context is open."""


class DifferentiationError(DistgradError, TypeError):
    """A derivative across workers cannot be computed as requested: a root that is not a scalar, for example."""


class LauncherError(DistgradError, RuntimeError):
    """The command line could not start a job (no MPI, no such script, bad number of workers)."""


class TimelineError(DistgradError, RuntimeError):
    """A timeline could not be recorded, read, merged or drawn."""


class CollectiveError(DistgradError, RuntimeError):
    """A collective operation could not be carried out, or was used where it has no meaning."""


class MissingRanksError(CollectiveError, TimeoutError):
    """Some ranks did not come to a step where others waited for them; ``missing`` lists the absent ranks."""

    missing: list[int]


class DisagreementError(CollectiveError, ValueError):
    """The ranks differ in their leaves, their settings or their step. Nothing was reduced.

    ``failed``: the ranks whose step has failed, for a reason of their own, where that is why.
    """

    failed: frozenset[int] = frozenset()


class LeafError(DistgradError, TypeError):
    """A leaf of a tree cannot be averaged, or was given twice or never; ``path`` names the leaf."""


class HookError(DistgradError, TypeError):
    """A communication hook is invalid, cannot be used here, or did not return its reduced bucket."""


class ScheduleError(DistgradError, ValueError):
    """A schedule of a pipeline is malformed, incomplete or would never end.

    ``waiting`` names actions that wait for each other, each with its worker, if that is why.
    """

    waiting: tuple[Any, ...] = ()


class CheckpointError(DistgradError, RuntimeError):
    """A checkpoint could not be written or restored. Those that are complete stay so."""


class NonFiniteError(DistgradError, ArithmeticError):
    """A gradient held NaN or infinity, and ``check_finite`` is set; ``rank`` and ``path`` say where."""
