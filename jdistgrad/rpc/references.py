"""Remote references: a value that stays where it was made, and can be named from everywhere."""

import concurrent.futures
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from jdistgrad.errors import NotOwnerError, StaleReferenceError
from jdistgrad.rpc import codec, trees
from jdistgrad.rpc.claims import Claim
from jdistgrad.rpc.current import current_worker
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.wire import ids

if TYPE_CHECKING:
    from jdistgrad.rpc.worker import Worker

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value on some worker, its owner.

    As an argument of a remote call it arrives as its *value*, fetched from the owner if need be; ``by_reference``
    sends the reference itself. The value lives as long as any worker holds a reference to it.

    Arguments:
      value: what to refer to; it stays on this worker.

    Example:
      >>> params = jd.remote("worker1", init_params, args=(seed,))   # made and kept there
      >>> jd.rpc_sync("worker1", apply, args=(params, x))            # used there, no copy
      >>> params.to_here()                                           # a copy of it here
    """

    __slots__ = ("__weakref__", "_claim")
    _claim: Claim

    def __init__(self, value: T):
        worker = current_worker()
        self._claim = worker.own(value)

    @classmethod
    def _of(cls, claim: Claim) -> "RRef":
        reference = object.__new__(cls)
        reference._claim = claim
        return reference

    @property
    def id(self) -> int:
        """The reference's 64-bit id: the worker that made it in the top 16 bits."""
        return self._claim.id

    @property
    def owner(self) -> WorkerInfo:
        """The worker that holds the value."""
        return self._claim.worker.directory.workers[self._claim.owner]

    def is_owner(self) -> bool:
        """Whether this worker holds the value."""
        return self._claim.owner == self._worker("is_owner").rank

    def to_here(self, timeout: float | None = None) -> T:
        """The value: itself on its owner, a copy elsewhere. Waits until it has been made.

        Raises:
          CallTimeoutError: not within ``timeout`` seconds (default: the world's).
          Exception: what ``remote``'s function raised.
        """
        return self._worker("to_here").fetch(self._claim, timeout).result()

    def local_value(self) -> T:
        """The value, on its owner only; no copy.

        Raises:
          NotOwnerError: this worker does not own it.
        """
        worker = self._worker("local_value")
        if self._claim.owner != worker.rank:
            raise NotOwnerError(
                f"local_value() of {self} was called on {worker.info}, but only its owner {self.owner} holds the "
                "value. Use to_here() for a copy.",
                owner=self.owner,
            )
        return worker.fetch(self._claim, None).result()

    def creation(self, timeout: float | None = None) -> concurrent.futures.Future:
        """A future that is done when the value has been made on its owner, or has failed to be.

        Where ``remote`` was called, it fails after the timeout given there; the value itself can still be had later.
        """
        return self._worker("creation").creation(self._claim, timeout)

    def rpc_sync(self, timeout: float | None = None) -> "MethodCaller":
        """Call a method of the value where it lives: ``rref.rpc_sync().method(x)``."""
        return MethodCaller(self, self._worker("rpc_sync").rpc_sync, timeout)

    def rpc_async(self, timeout: float | None = None) -> "MethodCaller":
        """Like ``rpc_sync``; the method returns a future."""
        return MethodCaller(self, self._worker("rpc_async").rpc_async, timeout)

    def remote(self, timeout: float | None = None) -> "MethodCaller":
        """Like ``rpc_sync``; the method returns a reference to its result."""
        return MethodCaller(self, functools.partial(remote, self._worker("remote")), timeout)

    def _worker(self, what: str) -> "Worker":
        worker = current_worker()
        if worker.world != self._claim.worker.world:
            raise StaleReferenceError(
                f"{what}: {self} belongs to a world that has been shut down, not to the one that is open now. "
                "Make the value again in this world."
            )
        return worker

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RRef):
            return NotImplemented
        return (self.id, self._claim.worker.world) == (other.id, other._claim.worker.world)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"RRef({ids.spell(self.id)} on {self.owner})"

    def __copy__(self) -> "RRef":
        return self

    def __deepcopy__(self, memo: Any) -> "RRef":
        return self

    def __reduce__(self) -> Any:
        self._worker("sending")
        return _arrived, (codec.ship(self._claim),)


def _arrived(number: int) -> RRef:
    return RRef._of(codec.arrived(number))


class ByReference:
    """An RRef that shall arrive as a reference."""

    __slots__ = ("rref",)

    def __init__(self, rref: RRef):
        self.rref = rref


def by_reference(rref: RRef) -> Any:
    """Pass a reference itself to a remote call, not the value it stands for.

    Example:
      >>> jd.rpc_sync("worker1", keep_for_later, args=(jd.by_reference(rref),))
    """
    if not isinstance(rref, RRef):
        raise TypeError(f"by_reference takes an RRef, not {type(rref).__name__}")
    rref._worker("sending")
    return ByReference(rref)


def remote(worker: "Worker", to: Any, function: Any, args: tuple, kwargs: dict, timeout: float | None) -> RRef:
    """Run a function on a worker and refer to its result."""
    return RRef._of(worker.call_remote(to, function, args, kwargs, timeout))


class MethodCaller:
    """Attribute access on it calls a method of a referenced value, on its owner."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: RRef, call: Callable[..., Any], timeout: float | None):
        self._rref, self._call, self._timeout = rref, call, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            target = (by_reference(self._rref), name, args, kwargs)
            return self._call(self._rref.owner, call_method, target, {}, self._timeout)

        return method


def call_method(reference: RRef, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs on the owner."""
    return getattr(reference.local_value(), name)(*args, **kwargs)


def delivered(worker: "Worker", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments as the called function shall see them: references replaced by their values, fetched all at once.

    There is no time limit here: the call has one.
    """
    if trees.are_plain(args, kwargs):
        return args, kwargs
    fetched: dict[RRef, concurrent.futures.Future] = {}

    def start(leaf: Any) -> Any:
        if isinstance(leaf, RRef) and leaf not in fetched:
            fetched[leaf] = leaf._worker("sending").fetch(leaf._claim, math.inf)
        return leaf

    def finish(leaf: Any) -> Any:
        if isinstance(leaf, RRef):
            return fetched[leaf].result()
        return leaf.rref if isinstance(leaf, ByReference) else leaf

    return trees.map_leaves(finish, trees.map_leaves(start, (args, kwargs), RRef), RRef)
