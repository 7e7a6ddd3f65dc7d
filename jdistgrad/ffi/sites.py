"""The sites in compiled programs that call Python functions on CPUs.

JAX's own callbacks run on the thread that executes the program, often a thread of XLA's pool, which has as many threads
as cores: when each of them waits for another worker in a callback, this process never computes what others request.
Here the handler that XLA calls returns at once. The function runs on a thread of our own unbounded pool, which then
tells XLA that the program may go on.
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
    """The rest of a quick function that has to wait after all, as a function without arguments."""

    rest: Callable[[], Sequence[Any] | None]


class Site:
    """A call in a compiled program. The site must live as long as the program, and every run of the program.

    A run may outlast the last reference to the compiled function. JAX keeps host callbacks until the end of a run, so
    the site is registered as a host callback. It is never called as a callback: XLA's handler finds it by its number.

    Arguments:
      function: takes the operands as NumPy arrays that it may keep; returns the results, in order, or nothing.
      operands, results: shapes and dtypes. XLA passes a token, if there is any, after these.
      quick: whether the function runs on XLA's thread, where nothing may wait. It returns a part that has to wait as
        a ``Deferred``.
      devices: how many the program runs on.
      together: how many devices make each call together, since XLA divides the program among them; and, if there are
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
    for place, result in zip(results, found or (), strict=True):
        place[...] = result


class SharedCalls:
    """The calls of a site that the devices of a group make together: one of them performs each, for all.

    The devices run one program: the k-th call that one of them makes at a place of it is the k-th of each. At different
    places they may come in different orders.
    """

    def __init__(self, count: int, groups: Mapping[int, Any]):
        self._count, self._groups, self._lock = count, groups, threading.Lock()
        self._runs: dict[Any, tuple[collections.Counter[int], dict[int, concurrent.futures.Future[Any]]]] = {}

    def once(self, run: int, device: int, place: Any, perform: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that performs a device's next call in a run, or waits for another device that does.

        Arguments:
          run, device: their numbers.
          place: what tells the copies of the site in the program apart.
        """
        key = run, place, self._groups.get(device)
        with self._lock:
            made, results = self._runs.setdefault(key, (collections.Counter(), {}))
            turn, first = made[device], made[device] not in results
            found = results.setdefault(turn, concurrent.futures.Future())
            made[device] += 1
            if sum(count > turn for count in made.values()) == self._count:
                del results[turn]
                if not results:  # all have made equally many
                    del self._runs[key]

        def perform_for_all() -> Any:
            try:
                found.set_result(perform())
            except BaseException as error:
                found.set_exception(error)
            return found.result()

        return perform_for_all if first else found.result


class SiteCall:
    """A call under way. It ends once, with its function or by a cancellation; then XLA owns the results' memory."""

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
    """Return whether this thread runs a call that compiled code will not wait for any more."""
    call = getattr(_running, "call", None)
    return call is not None and call.cancelled


def cancel_all() -> None:
    """End every call that compiled code waits for. Those that ask whether they are cancelled may end by themselves."""
    calls, end = list(_under_way), time.monotonic() + TO_END
    for call in calls:
        call.cancelled = True
    while not _under_way.isdisjoint(calls) and time.monotonic() < end:
        time.sleep(TO_END / 20)
    for call in calls:
        call.end(None, KeyboardInterrupt("while compiled code waited for other workers"))


# Starts at random, so that a program compiled in another process finds no site here by accident.
_numbers = itertools.count(secrets.randbits(62))
_sites: "weakref.WeakValueDictionary[int, Site]" = weakref.WeakValueDictionary()
# Empty if no compiled program of this process calls Python here.
registered: dict[int, Any] = _sites.data  # type: ignore[attr-defined]
_threads = ThreadPool("jdistgrad-compiled")
_under_way: set[SiteCall] = set()
_running = threading.local()

# Calls run in a copy of the context (``contextvars``) of the thread that runs the program, and so does what follows in
# the program, which goes on where they end. The context of one of XLA's threads says nothing about the caller.
_by_xla: contextvars.ContextVar[bool] = contextvars.ContextVar("jdistgrad_by_xla", default=False)


def in_callers_context() -> bool:
    """Return whether a site's function runs in the context of the Python code that has called the program."""
    return not _by_xla.get()


@called_by_c
def _handle(address: int) -> int | None:
    call: SiteCall | None = None
    try:
        frame = abi.CallFrame.from_address(address)
        if frame.answers_about_itself() or frame.stage != abi.EXECUTE:
            return None
        number, copy = frame.number_and_copy()
        site = _sites[number]
        copies = [aligned_copy(abi.view(frame.operands.values[k], *one)) for k, one in enumerate(site.operands)]
        operands = [one.astype(dtype, copy=False) for one, dtype in zip(copies, site.dtypes, strict=True)]
        results = [abi.view(frame.results.values[k], *one) for k, one in enumerate(site.results)]
        whole: Callable[[], Any] = functools.partial(site.function, *operands)
        if site.shared is not None:
            whole = site.shared.once(*frame.run_and_device(), copy, whole)
        found = whole() if site.quick else Deferred(whole)
        if isinstance(found, Deferred):
            # A thread of XLA's pool runs the program if there is no Python frame below this one.
            here, by_xla = contextvars.copy_context(), sys._getframe().f_back is None
            here.run(_by_xla.set, by_xla or _by_xla.get())
            hint = ON_DEVICES.format(site.devices) if site.devices > 1 else HELD_A_THREAD if by_xla else ""
            call = SiteCall(found.rest, results, frame.begin(), hint)
            _threads.run(functools.partial(here.run, call.run))
        else:
            _put(found, results)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):  # else only the program's error would tell of it
            signal_again(signal.SIGINT)
        if call is None:
            return abi.CallFrame.from_address(address).error(in_words(error), code_of(error))
        call.end(None, error)
    return None


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """Copy an argument, so that it can be kept after the call, into memory that XLA can use as it is.

    XLA copies unaligned memory on its own threads, and runs a program that waits for such a copy on one of them.
    """
    if array.nbytes < ALIGNED_FROM:
        return np.array(array)
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    own = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    own[...] = array
    return own


def in_words(error: BaseException) -> str:
    """Spell an error with its notes: XLA keeps only the text of an exception in compiled code."""
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
