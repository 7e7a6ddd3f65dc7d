"""The current worker and the current scope of running code.

A process under mpirun is one worker. In a local world each worker has threads bound to it: the threads that serve its
calls, and the thread that ``spawn`` starts, in which ``seat`` is its hub and rank. Every other thread has the worker of
the process, if there is one.
"""

import contextlib
import contextvars
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import jax

from jdistgrad.errors import NotInitializedError
from jdistgrad.wire.interrupts import put_off_interrupt

if TYPE_CHECKING:
    from jdistgrad.rpc.directory import WorkerInfo
    from jdistgrad.rpc.scopes import Scope
    from jdistgrad.wire.local import Hub

P = ParamSpec("P")
T = TypeVar("T")

Resident = Any  # a worker: a ``Mailbox``, of a layer above

_bound: contextvars.ContextVar[Resident] = contextvars.ContextVar("jdistgrad_worker", default=None)
seat: "contextvars.ContextVar[tuple[Hub, int] | None]" = contextvars.ContextVar("jdistgrad_seat", default=None)
_scope: "contextvars.ContextVar[Scope | None]" = contextvars.ContextVar("jdistgrad_scope", default=None)
_of_process: Resident = None
_key_of_process: int | None = None
_left_behind: str | None = None  # in a forked process: the error text that says so, with the remedy

# Part of JAX's trace key: a function traced on one worker is traced again on another worker of the same process. JAX
# compares the value at every dispatch, so it is a small number for each worker among workers of these names, not the
# worker itself: a world uses what the one before it has compiled. Worlds that are open at the same time have different
# numbers. Threads that are not bound have that of the process: None in no world, and in worlds like the first one, as
# what was traced before that has no calls.
_trace_key = jax.make_user_context(default_value=None)
_trace_keys: dict["Seat", list[int]] = {}
_trace_keys_of_process: dict["Seat", int | None] = {}
_new_keys = itertools.count()
_choosing = threading.Lock()

# Host callbacks of compiled code run on XLA's threads. They find their worker and scope by the origin of the code: the
# trace key of the worker that compiled it, and the slot that each open scope has while a thread is in it. The first
# slot is not part of the trace key, so JAX compiles again only for scopes that are open at the same time.
_slot_key = jax.make_user_context(default_value=0)


class Origin(NamedTuple):
    """Where code was compiled: the worker's trace key (None: the process's worker), and the scope's slot."""

    key: int | None
    slot: int


NOWHERE = Origin(None, 0)
_origin: contextvars.ContextVar[Origin] = contextvars.ContextVar("jdistgrad_origin", default=NOWHERE)

current_scope = _scope.get
origin = _origin.get  # of this code, for callbacks of programs compiled here

Seat = tuple["WorkerInfo", tuple["WorkerInfo", ...]]  # a worker, and all workers of its world

_workers: "weakref.WeakValueDictionary[int, Resident]" = weakref.WeakValueDictionary()


class Slots:
    """The scopes that threads of one worker are in. A scope takes the first free slot when its first thread enters."""

    def __init__(self) -> None:
        self._scopes: list[Scope | None] = []
        self._threads: list[int] = []
        self._lock = threading.Lock()

    def take(self, scope: "Scope") -> int:
        with self._lock:
            if scope not in self._scopes:
                if None not in self._scopes:
                    self._scopes.append(None)
                    self._threads.append(0)
                self._scopes[self._scopes.index(None)] = scope
            slot = self._scopes.index(scope)
            self._threads[slot] += 1
            return slot

    def free(self, slot: int) -> None:
        with self._lock:
            self._threads[slot] -= 1
            if not self._threads[slot]:
                self._scopes[slot] = None

    def at(self, slot: int) -> "Scope | None":
        with self._lock:
            return self._scopes[slot] if slot < len(self._scopes) else None


def current_resident() -> Resident:
    """Return the worker that this code runs on. Raises NotInitializedError if there is none."""
    worker = _bound.get() or find_resident()
    if worker is None or _left_behind:
        raise NotInitializedError(
            _left_behind
            or "there is no world here: jdistgrad.init() was not called, or shutdown() was. Call init() first; in a "
            "thread started inside spawn's main, run its target with contextvars.copy_context().run; for jitted "
            "functions see docs/sharp-bits.md."
        )
    return worker


def find_resident() -> Resident:
    worker = _bound.get()
    if worker is None and seat.get() is None:
        worker = _of_process
    return None if _left_behind else worker


def is_stray_thread() -> bool:
    """Return whether this thread belongs to no worker, while other threads of this process are workers of a world."""
    others = [worker for worker in list(_workers.values()) if not worker.closed and worker.failure is None]
    return bool(others) and threading.current_thread() is not threading.main_thread()


class within:  # noqa: N801 used like a function; a generator would take twice as long
    """A block whose calls belong to a scope, or to none. To end it a second time does nothing."""

    __slots__ = ("_compiling", "_outer", "_outer_origin", "_scope", "_slot", "_slots")

    def __init__(self, scope: "Scope | None"):
        self._scope = scope
        self._slots: Slots | None = None
        self._outer: contextvars.Token[Any] | None = None

    def __enter__(self) -> None:
        if self._scope is None or self._scope is _scope.get():
            self._outer = _scope.set(self._scope)
            return
        slots, key = current_resident().slots, origin().key
        try:
            with put_off_interrupt():  # which would leave this thread in the scope for ever
                self._slots, self._slot = slots, slots.take(self._scope)
                self._outer_origin = _origin.set(Origin(key, self._slot))
                self._compiling = _slot_key(self._slot) if self._slot else None
                if self._compiling is not None:
                    self._compiling.__enter__()
                self._outer = _scope.set(self._scope)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        with put_off_interrupt():
            if self._outer is not None:
                _scope.reset(self._outer)
                self._outer = None
            if self._slots is not None:
                if self._compiling is not None:
                    self._compiling.__exit__(*error)
                _origin.reset(self._outer_origin)
                self._slots.free(self._slot)
                self._slots = None


def once_for_all(function: Callable[P, T]) -> Callable[P, T]:
    """Let JAX compile a jitted function once for all workers and scopes of this process. It must not call back."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if origin() == NOWHERE and _key_of_process is None:
            return function(*args, **kwargs)
        with _trace_key(None), _slot_key(0):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def at(place: Origin, *, called_here: bool = False) -> Iterator[None]:
    """Let the block, on any thread, belong to the worker and scope of an origin.

    ``called_here``: the block's own scope is that of the code that has called the compiled function. The origin's slot
    may meanwhile be another's: code in no scope has the first slot too, and a function compiled ahead of time keeps its
    slot.
    """
    worker = _of_process if place.key is None else _workers.get(place.key)
    if worker is None or _left_behind:
        why = _left_behind or "the world it was compiled in is closed"
        raise NotInitializedError(f"a compiled function was called outside of any world: {why}")
    scope = _scope.get() if called_here and find_resident() is worker else worker.slots.at(place.slot)
    before = _bound.set(worker), _scope.set(scope), _origin.set(place)
    try:
        yield
    finally:
        _bound.reset(before[0])
        _scope.reset(before[1])
        _origin.reset(before[2])


def bind_thread(worker: Resident) -> None:
    """Let this thread, and contexts copied from it, belong to this worker."""
    _bound.set(worker)
    if worker.hands_over:
        key = _key_of(worker)
        _origin.set(Origin(key, 0))
        _trace_key(key).__enter__()
    if worker.device is not None:
        jax.default_device(worker.device).__enter__()


def _key_of(worker: Resident) -> int:
    """Return the trace key of a worker: its own, or one that no open world uses, nor a call that outlives one."""
    with _choosing:
        keys = _trace_keys.setdefault((worker.info, worker.directory.workers), [])
        users = {key: _workers.get(key) for key in keys}
        own = [key for key, user in users.items() if user is worker]
        free = [key for key, user in users.items() if user is None or (user.closed and not any(user.work.serving))]
        key = (own or free or [next(_new_keys)])[0]
        if key not in users:
            keys.append(key)
        _workers[key] = worker
        return key


def bind_process(worker: Resident) -> None:
    """Let every thread that is not bound belong to this worker."""
    global _of_process
    _of_process = worker
    with _choosing:
        keys, seat = _trace_keys_of_process, (worker.info, worker.directory.workers)
        if seat not in keys:
            keys[seat] = next(_new_keys) if keys else None
        _set_key_of_process(keys[seat])


def unbind(worker: Resident) -> None:
    """Unbind this thread and the process from a worker that has left its world, with all of its scopes."""
    global _of_process
    _scope.set(None)  # a block of it may end later, or never: in a notebook one may be open across cells
    if _bound.get() is worker:
        _bound.set(None)
    if _of_process is worker:
        _of_process = None
        _set_key_of_process(None)


def _set_key_of_process(key: int | None) -> None:
    global _key_of_process
    if key != _key_of_process:
        _key_of_process = key
        _trace_key.set_global(key)


def _in_child() -> None:
    """Note that this process was forked from a worker's process, and so has no world and no scope."""
    global _left_behind
    open_ones = [worker for worker in (_of_process, *_workers.values()) if worker is not None and not worker.closed]
    if open_ones:
        _left_behind = (
            f"this process was forked from that of {open_ones[0].info} and has no world: neither threads nor MPI "
            "outlive a fork. Leave calls to the process it was forked from, or start it with subprocess or "
            "multiprocessing's 'spawn'."
        )
        _scope.set(None)


os.register_at_fork(after_in_child=_in_child)


def fork_error() -> str | None:
    """Return why this process can have no world, if it was forked from a worker's process."""
    return _left_behind
