"""Bundles: the stops of one message, in turn. A stop may need arrays that an earlier stop makes.

A bundle holds everything about its stops that is the same in every run of a step. Workers decode it once, and run it as
one compiled function where possible, else stop by stop.
"""

import collections
import concurrent.futures
import copy
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np

from jdistgrad.autograd.callee.derivatives import Outputs
from jdistgrad.autograd.tape.tape import Place, answer, current_tape, next_message, next_place
from jdistgrad.autograd.values.holes import Uniform, as_jax, strong
from jdistgrad.autograd.values.primitive import has_wire
from jdistgrad.rpc.by_value import OWN, Cached, from_cache
from jdistgrad.rpc.codec import BY_PARTS
from jdistgrad.rpc.functions import ServedFunction, describe
from jdistgrad.rpc.pending import task_served
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.arrays import ArrayBlock

KEPT = 64  # compiled forms per bundle; compiling does not pay if the functions change every time


class Stop(ServedFunction):
    """What a worker does for one operation: a function of items, which are arrays, or other values of an eager call.

    Classes of stops are dataclasses of what is the same in every run of a step. Attributes of a run:

      function: the function that the stop calls.
      numbers: ids; for a call and what follows it, first that of the message by which the recording is found.
      place: in the program's order.
    """

    function: Any = None
    numbers: tuple[int, ...] = ()
    place: Place = ()

    call: int | None = None  # in a bundle, the turn of the stop that makes the recording that this one uses, if there
    takes_numpy: ClassVar[bool] = False  # whether arrays of JAX need not be made for it
    follows: ClassVar[bool] = False  # whether it uses a recording
    orders: Any = ()  # of the derivatives that it records
    is_closed: Any = False  # whether it only computes, and the recording that it uses is not used again
    traced: Any  # computes in a compiled bundle, where recordings are kept by the turns of their stops

    @property
    def recorded_as(self) -> int | None:
        return self.numbers[0] if self.orders or self.follows else None

    def of_run(self, function: Any, numbers: tuple[int, ...] = (), place: Place = ()) -> Self:
        found = copy.copy(self)
        found.function, found.numbers, found.place = function, numbers, place
        return found


@dataclasses.dataclass(frozen=True)
class StopOutput:
    """An array that an earlier stop makes: the turn of the stop, and the number of the array."""

    turn: int
    number: int


Source = int | StopOutput | Uniform  # an int is the number of an array that the message brings


Compiled = Callable[[list[Any]], list[Any] | None]  # from the items of a bundle to the wanted arrays


@dataclasses.dataclass(eq=False)
class Bundle:
    """Stops, the sources of the items of each, and the arrays that go back.

    Attributes:
      wanted: None if there is one stop, whose items are all that the message brings: what it returns goes back.
      needed: the arrays for later stops or the caller.
      forgotten: for each stop, the arrays of which it is the last user.
      is_closed: whether only arrays come and go and no recording is left: the bundle pulls everything it records.
    """

    stops: list[Stop]
    sources: list[list[Source]]
    wanted: list[StopOutput] | None

    def __post_init__(self) -> None:
        last = {one: turn for turn, used in enumerate(self.sources) for one in used if not isinstance(one, Uniform)}
        wanted = self.wanted or []
        self.forgotten: list[list[int | StopOutput]] = [[] for _ in self.stops]
        for one, turn in last.items():
            if one not in wanted:
                self.forgotten[turn].append(one)
        self.needed = frozenset(one for one in (*last, *wanted) if isinstance(one, StopOutput))
        recorded = {turn for turn, one in enumerate(self.stops) if one.orders}
        pulled = {one.call for one in self.stops if one.follows}
        alone = self.wanted is None
        self.is_closed = not alone and recorded == pulled and all(one.is_closed for one in self.stops)
        self._compiled = collections.OrderedDict[tuple[int, ...], Compiled]()
        self._made = self._used = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return Bundle, (self.stops, self.sources, self.wanted)

    def at_once(self, functions: Sequence[Any], items: list[Any]) -> list[Any] | None:
        """Run the bundle as one compiled function and return the wanted arrays.

        Returns None if the stops must run one by one, or if most functions come only once. A compiled form keeps its
        functions alive, so only those used last are kept.
        """
        key = tuple(map(id, functions))
        with self._lock:
            self._used += 1
            run = self._compiled.get(key)
            if run is not None:
                self._compiled.move_to_end(key)
            elif self._made < KEPT or self._used > 2 * self._made:
                self._made += 1
                run = self._compiled[key] = compiled_bundle(self, tuple(functions))
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
        return None if run is None else run(items)

    def walk(self, items: list[Any], run: Callable[[int, list[Any]], list[Any]]) -> list[Any]:
        """Return the wanted arrays. ``run`` makes the arrays of a stop. Arrays are dropped after their last use."""
        before = dict[StopOutput, Any]()

        def found(source: Source) -> Any:
            if isinstance(source, int):
                return items[source]
            return before[source] if isinstance(source, StopOutput) else source

        for turn, sources in enumerate(self.sources):
            for number, array in enumerate(run(turn, [found(source) for source in sources])):
                if StopOutput(turn, number) in self.needed:
                    before[StopOutput(turn, number)] = array
            for one in self.forgotten[turn]:
                if isinstance(one, StopOutput):
                    del before[one]
                else:
                    items[one] = None
        return [before[one] for one in self.wanted or ()]


@functools.lru_cache(maxsize=4096)
def alone(stop: Stop) -> Cached[Bundle]:
    """Return the bundle of a stop that has a message to itself, prepared once for all equal stops."""
    return from_cache(Cached(Bundle([stop], [[]], None)).stream)


def compiled_bundle(bundle: Bundle, functions: tuple[Any, ...]) -> Compiled:
    """Compile a bundle together with its functions, once per shape. Returns None if the stops must run one by one."""

    def run(items: list[Any]) -> Outputs:
        recordings: dict[int | None, Any] = {}

        def stop(turn: int, items: list[Any]) -> list[Any]:
            return bundle.stops[turn].of_run(functions[turn]).traced(turn, items, recordings)

        return Outputs.of(bundle.walk(list(map(strong, items)), stop), items)

    jitted = jax.jit(run)
    fits: dict[Any, bool] = {}  # by the shapes and dtypes of the items

    def run_at_once(items: list[Any]) -> list[Any] | None:
        kinds = tuple([(one.shape, one.dtype) for one in items])
        if kinds not in fits:
            try:
                traced = jitted.trace(items).jaxpr
                fits[kinds] = not traced.effects and not has_wire(traced.jaxpr)
            except Exception:  # run stop by stop, the bundle will raise this error at the stop that causes it
                fits[kinds] = False
        return jitted(items).filled(items) if fits[kinds] else None

    return run_at_once


class BundleRun(ServedFunction):
    """A run of a bundle: its functions (None for pulls), and the numbers of each stop. Called with what it brings."""

    takes_references = True

    def __init__(
        self,
        bundle: Cached[Bundle],
        functions: Sequence[Any],
        numbers: Sequence[tuple[int, ...]],
        place: Place,
    ):
        self.bundle = bundle
        self._functions, self._numbers, self._place = functions, numbers, place
        self._running: int | None = None
        self._looks_for_failure = False  # the compiled form failed: run again stop by stop, to find the stop that fails

    def __reduce__(self) -> Any:
        """Return parts that differ from run to run only in the numbers of arrays (see ``rpc.codec``)."""
        numbers = [number for one in self._numbers for number in (len(one), *one)]
        arrays = np.array(numbers, np.uint64), np.array(self._place, np.int64)
        return _arrived, (self.bundle, tuple(self._functions), *arrays)

    @functools.cached_property
    def stops(self) -> list[Stop]:
        each = enumerate(zip(self.bundle.value.stops, self._functions, self._numbers, strict=True))
        return [one.of_run(function, numbers, (*self._place, turn)) for turn, (one, function, numbers) in each]

    @property
    def label(self) -> str:
        """Return the name of the stop that is running, or of the whole bundle."""
        running = self._running
        names = [one.label for one in (self.stops if running is None else self.stops[running : running + 1])]
        return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")

    @property
    def served_as(self) -> str:
        return self.stops[0].served_as if len(self._functions) == 1 else super().served_as

    @property
    def recorded_as(self) -> int | None:
        """Return the message id of the only stop, or None if there are several stops or the stop has no id."""
        return self.stops[0].recorded_as if len(self._functions) == 1 else None

    def failed(self, error: BaseException) -> None:
        for one in self.stops:
            one.failed(error)

    def __call__(self, items: list[Any]) -> Any:
        bundle = self.bundle.value
        if bundle.wanted is None:
            return self._run(0, items)
        found = self._at_once(items) if bundle.is_closed else None
        if found is None:  # stop by stop
            found = bundle.walk(items, self._run)
            self._running = None
        return ArrayBlock(found)

    def _at_once(self, items: list[Any]) -> list[Any] | None:
        try:
            found = self.bundle.value.at_once(self._functions, list(items))  # in one process the block itself comes
            jax.block_until_ready(found)  # raises here any error from computing them
        except Exception:
            self._looks_for_failure = True
            return None
        if found is not None and any(self._numbers):  # note answers, as if each call had been answered on its own
            each = zip(self._functions, self._numbers, strict=True)
            answers = [(next_message(), mine[0], function) for function, mine in each if function is not None and mine]
            links = current_tape(lambda: self.label).links
            links.append(lambda: [answer(message, call, describe(function)) for message, call, function in answers])
        return found

    def _run(self, turn: int, items: list[Any]) -> Any:
        self._running = turn
        stop, since, failed = self.stops[turn], time.monotonic(), True
        try:
            if self.bundle.value.wanted is not None and not stop.takes_numpy:
                items = list(map(strong, as_jax(items)))
                current_worker().wait_for_arguments(items)
            found = stop(items)
            if self._looks_for_failure:
                jax.block_until_ready(found)
            failed = False
            return found
        finally:
            if len(self._functions) > 1:
                task_served(stop, current_worker().info, since, failed=failed)


def _arrived(bundle: Cached[Bundle], functions: tuple[Any, ...], numbers: Any, place: Any) -> BundleRun:
    left = iter(numbers.tolist())
    each = [tuple(itertools.islice(left, count)) for count in left]
    return BundleRun(bundle, functions, each, tuple(place.tolist()))


def send_alone(
    to: int, stop: Stop, function: Any, numbers: tuple[int, ...], items: list[Any], timeout: float | None
) -> concurrent.futures.Future[Any]:
    """Send a message with one stop; return a future of what the stop returns."""
    run = BundleRun(alone(stop), (function,), (numbers,), next_place())
    return current_worker().rpc_async(to, run, (items,), {}, timeout)


OWN.add(BundleRun)
BY_PARTS.add(BundleRun)
