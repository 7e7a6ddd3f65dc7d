"""Calls of Python functions from compiled programs on CPUs, without blocking XLA's threads.

JAX's own callbacks run on the thread that executes the program, often one of XLA's pool, which has as many threads as
cores: once each of them waits for another worker in a callback, this process computes nothing that others request.
Here the handler that XLA calls returns at once. The function runs on a thread of our own unbounded pool, which then
completes XLA's future.
"""

import collections
import concurrent.futures
import contextvars
import dataclasses
import functools
import itertools
import secrets
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.ffi import abi
from jdistgrad.ffi.dispatch import HELD_A_THREAD, ON_DEVICES, run_programs_where_they_are_called
from jdistgrad.threads import ThreadPool, called_by_c, signal_again

TARGET = "jdistgrad_call"

# The absl status codes that errors here have.
CANCELLED, DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE = 1, 4, 13, 14

TO_END = 0.05  # seconds, for calls that are cancelled

ALIGNMENT = 64  # bytes
ALIGNED_FROM = 1 << 12  # smaller arrays are copied at once, on the thread that needs them

Function = Callable[..., Any]
Together = tuple[int, Mapping[int, Any]]

ALONE: Together = 1, {}


@dataclasses.dataclass(slots=True)
class Deferred:
    """The part of a quick function that has to wait, as a function without arguments."""

    rest: Callable[[], Sequence[Any] | None]


class Site:
    """A call in a compiled program. The site must live as long as the program, and every run of the program.

    A run may outlast the last reference to the compiled function. JAX keeps host callbacks until the end of a run, so
    the site is registered as a host callback. It is never called as one: XLA's handler looks it up by its number.

    Arguments:
      function: takes the operands as NumPy arrays that it may keep; returns the results, in order, or nothing.
      operands, results: shapes and dtypes. XLA passes a token, if there is any, after these.
      quick: whether the function runs on XLA's thread, where nothing may wait; it returns a part that has to wait as a
        ``Deferred``.
      devices: how many the program runs on.
      together: how many devices make each call together, since XLA partitions the program over them; and, if there are
        several groups of such devices, the group of each device, by number.
    """

    def __init__(
        self,
        function: Function,
        operands: Sequence[Any],
        results: Sequence[Any],
        *,
        quick: bool,
        devices: int = 1,
        together: Together = ALONE,
    ):
        self.function, self.quick, self.devices = function, quick, devices
        self.shared = SharedCalls(*together) if together[0] > 1 else None
        self.operands, self.results = (
            [(tuple(one.shape), abi.carrier(one.dtype)) for one in arrays] for arrays in (operands, results)
        )
        self.dtypes = [np.dtype(one.dtype) for one in operands]
        self.number = np.uint64(next(_numbers))
        _sites[int(self.number)] = self

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError


def _put(found: Sequence[Any] | None, results: Sequence[np.ndarray]) -> None:
    for memory, result in zip(results, found or (), strict=True):
        memory[...] = result


class SharedCalls:
    """The calls that the devices of a group make together: one device performs each, for all.

    The devices run one program: the k-th call that a device makes at a place in the program is the k-th of each device.
    At different places they may come in different orders.
    """

    def __init__(self, count: int, groups: Mapping[int, Any]):
        self._count, self._groups, self._lock = count, groups, threading.Lock()
        self._runs: dict[Any, tuple[collections.Counter[int], dict[int, concurrent.futures.Future[Any]]]] = {}

    def once(self, run: int, device: int, place: Any, perform: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that performs a device's next call in a run, or waits for the device that performs it.

        Arguments:
          run, device: their ids.
          place: identifies the copy of the call in the program.
        """
        key = run, place, self._groups.get(device)
        with self._lock:
            made, results = self._runs.setdefault(key, (collections.Counter(), {}))
            turn, first = made[device], made[device] not in results
            found = results.setdefault(turn, concurrent.futures.Future())
            made[device] += 1
            if sum(count > turn for count in made.values()) == self._count:
                del results[turn]
                if not results:
                    del self._runs[key]

        def result() -> Any:
            if first:
                try:
                    found.set_result(perform())
                except BaseException as error:
                    found.set_exception(error)
            return found.result()

        return result


class SiteCall:
    """A running call. It ends once, with its function or by a cancellation; then XLA owns the results' memory."""

    def __init__(self, function: Callable[[], Any], results: list[np.ndarray], pending: abi.AsyncResult, hint: str):
        self._function, self._results, self._pending, self._hint = function, results, pending, hint
        self._ended, self._lock = False, threading.Lock()
        self.cancelled = False
        _under_way.add(self)

    def run(self) -> None:
        _running.call = self
        try:
            self.end(self._function())
        except BaseException as error:
            if self._hint and isinstance(error, TimeoutError) and self._hint not in getattr(error, "__notes__", ()):
                error.add_note(self._hint)
            self.end(None, error)
        finally:
            _running.call = None

    def end(self, found: Sequence[Any] | None, error: BaseException | None = None) -> None:
        with self._lock:
            if self._ended:
                return
            if error is None:
                _put(found, self._results)
            self._ended = True
        _under_way.discard(self)
        if error is None:
            self._pending.done()
        else:
            self._pending.failed(in_words(error), code_of(error))


def is_cancelled() -> bool:
    """Return whether this thread runs a call that was cancelled."""
    call = getattr(_running, "call", None)
    return call is not None and call.cancelled


def cancel_all() -> None:
    """Fail every running call; first give those that check ``is_cancelled`` a moment to end by themselves."""
    calls, end = list(_under_way), time.monotonic() + TO_END
    for call in calls:
        call.cancelled = True
    while not _under_way.isdisjoint(calls) and time.monotonic() < end:
        time.sleep(TO_END / 20)
    for call in calls:
        call.end(None, KeyboardInterrupt("while compiled code waited for other workers"))


_numbers = itertools.count(secrets.randbits(62))  # random: a program compiled in another process must find no site here
_sites: "weakref.WeakValueDictionary[int, Site]" = weakref.WeakValueDictionary()
registered: dict[int, Any] = _sites.data  # type: ignore[attr-defined]  # empty if no program calls Python here
_threads = ThreadPool("jdistgrad-compiled")
_under_way: set[SiteCall] = set()
_running = threading.local()

# Calls run in a copy of the context (``contextvars``) of the thread that runs the program, and the program continues on
# their thread. The context of XLA's own threads is not that of the caller.
_by_xla: contextvars.ContextVar[bool] = contextvars.ContextVar("jdistgrad_by_xla", default=False)


def in_callers_context() -> bool:
    """Return whether a site's function runs in the context of the Python code that called the program."""
    return not _by_xla.get()


@called_by_c
def _handle(address: int) -> int | None:
    call: SiteCall | None = None
    try:
        frame = abi.CallFrame.from_address(address)
        if frame.is_version_query() or frame.stage != abi.EXECUTE:
            return None
        number, copy = frame.number_and_copy()
        site = _sites[number]
        copies = [aligned_copy(abi.view(frame.operands.values[k], *one)) for k, one in enumerate(site.operands)]
        operands = [one.astype(dtype, copy=False) for one, dtype in zip(copies, site.dtypes, strict=True)]
        results = [abi.view(frame.results.values[k], *one) for k, one in enumerate(site.results)]
        perform: Callable[[], Any] = functools.partial(site.function, *operands)
        if site.shared is not None:
            perform = site.shared.once(*frame.run_and_device(), copy, perform)
        found = perform() if site.quick else Deferred(perform)
        if isinstance(found, Deferred):
            here, by_xla = contextvars.copy_context(), sys._getframe().f_back is None  # no frame: a thread of XLA's
            here.run(_by_xla.set, by_xla or _by_xla.get())
            hint = ON_DEVICES.format(site.devices) if site.devices > 1 else HELD_A_THREAD if by_xla else ""
            call = SiteCall(found.rest, results, frame.begin(), hint)
            _threads.run(functools.partial(here.run, call.run))
        else:
            _put(found, results)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):  # Python sees only the program's error
            signal_again(signal.SIGINT)
        if call is None:
            return abi.CallFrame.from_address(address).error(in_words(error), code_of(error))
        call.end(None, error)
    return None


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """Copy an argument, which is to outlast the call, into memory that XLA can alias.

    XLA copies unaligned memory on its own threads, and runs programs that wait for such a copy on one of them.
    """
    if array.nbytes < ALIGNED_FROM:
        return np.array(array)
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    own = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    own[...] = array
    return own


def in_words(error: BaseException) -> str:
    """Return an error's text with its notes: XLA keeps only text."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return CANCELLED
    if isinstance(error, TimeoutError):
        return DEADLINE_EXCEEDED
    return UNAVAILABLE if isinstance(error, ConnectionError) else INTERNAL


run_programs_where_they_are_called()
_handler = abi.Function(_handle)
jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handler), platform="cpu", api_version=1)
