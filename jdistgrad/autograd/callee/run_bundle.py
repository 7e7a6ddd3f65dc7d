"""Runs of bundles on the worker they are sent to: as one compiled function where possible, else stop by stop."""

import collections
import threading
import time
from typing import Any

import jax

from jdistgrad import events
from jdistgrad.autograd.callee.bundle import Bundle, PullStop
from jdistgrad.autograd.callee.pullbacks import Outputs
from jdistgrad.autograd.callee.recording import Arguments, Recording
from jdistgrad.autograd.tape.links import Place, answer, next_message
from jdistgrad.autograd.tape.tape import current_tape
from jdistgrad.autograd.values.primitive import has_wire
from jdistgrad.autograd.values.results import as_jax, made, strong
from jdistgrad.rpc.by_value import OWN, Cached
from jdistgrad.rpc.calls.pending import task_served
from jdistgrad.rpc.functions import ServedFunction, describe
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.arrays import ArrayBlock

KEPT = 64  # compiled forms per bundle; compiling does not pay if the functions change every time


class CompiledBundle:
    """A bundle compiled together with its functions, once per shape."""

    def __init__(self, bundle: Bundle, functions: tuple[Any, ...]):
        def run(items: list[Any]) -> Outputs:
            recordings: dict[int | None, Recording] = {}

            def stop(turn: int, items: list[Any]) -> list[Any]:
                one, function = bundle.stops[turn], functions[turn]
                if isinstance(one, PullStop):
                    return recordings.pop(one.call).derived.pull(one.order, one.live, items, one.maps)
                if not one.orders:
                    return one.run(function, items)
                args, kwargs = one.arguments.fill(made(items))
                recordings[turn] = Recording(function, Arguments(args, kwargs, one.orders, one.lanes))
                return one.arrays(recordings[turn].result)

            return Outputs.of(bundle.walk(list(map(strong, items)), stop), items)

        self._run = jax.jit(run)
        self._fits: dict[Any, bool] = {}  # by the shapes and dtypes of the items

    def __call__(self, items: list[Any]) -> list[Any] | None:
        kinds = tuple([(one.shape, one.dtype) for one in items])
        fits = self._fits.get(kinds)
        if fits is None:
            try:
                traced = self._run.trace(items).jaxpr
                fits = not traced.effects and not has_wire(traced.jaxpr)
            except Exception:  # run stop by stop, the bundle will raise this error at the stop that causes it
                fits = False
            self._fits[kinds] = fits
        return self._run(items).filled(items) if fits else None


class CompiledBundles:
    """An LRU cache of one bundle's compiled forms. Entries keep their functions alive."""

    def __init__(self) -> None:
        self._found: collections.OrderedDict[tuple[int, ...], CompiledBundle] = collections.OrderedDict()
        self._made = self._used = 0
        self._lock = threading.Lock()

    def of(self, bundle: Bundle, functions: list[Any]) -> CompiledBundle | None:
        """Return the compiled form for these functions, or None if most functions come only once."""
        key = tuple(map(id, functions))
        with self._lock:
            self._used += 1
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            elif self._made < KEPT or self._used > 2 * self._made:
                self._made += 1
                found = self._found[key] = CompiledBundle(bundle, tuple(functions))
                if len(self._found) > KEPT:
                    self._found.popitem(last=False)
            return found


def at_once(bundle: Bundle, functions: list[Any], items: list[Any]) -> list[Any] | None:
    """Run a bundle as one compiled function and return the wanted arrays; None if the stops must run one by one."""
    if bundle.compiled_forms is None:
        bundle.compiled_forms = CompiledBundles()
    compiled = bundle.compiled_forms.of(bundle, functions)
    return None if compiled is None else compiled(items)


class BundleRun(ServedFunction):
    """A run of a bundle.

    Arguments:
      functions: the function of each stop, None for pulls.
      numbers: the ids of each stop's messages and contributions.
      items: the arrays that the message brings.
    """

    takes_references = True

    def __init__(
        self,
        bundle: Cached[Bundle],
        functions: list[Any],
        numbers: list[tuple[int, ...]],
        place: Place,
        items: list[Any],
    ):
        self._bundle, self._functions, self._numbers = bundle, functions, numbers
        self._place, self._items = place, items
        self._running: int | None = None
        self._looks_for_failure = False  # the compiled form failed: run again stop by stop, to find the stop that fails

    def __reduce__(self) -> Any:
        items = ArrayBlock(self._items) if self._bundle.value.is_closed else self._items
        return BundleRun, (self._bundle, self._functions, self._numbers, self._place, items)

    @property
    def label(self) -> str:
        """Return the name of the stop that is running, or of the whole bundle."""
        running = self._running
        if running is not None:
            return describe(self._task(running))
        names = [describe(self._task(turn)) for turn in range(len(self._functions))]
        return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")

    @property
    def served_as(self) -> str:
        return self._bundle.value.stops[0].served_as if len(self._functions) == 1 else events.SERVE

    @property
    def recorded_as(self) -> int | None:
        """Return the message id of the only stop, or None if there are several stops or the stop has no id."""
        return self._numbers[0][0] if len(self._numbers) == 1 and self._numbers[0] else None

    def __call__(self) -> list[Any]:
        found = self._at_once() if self._bundle.value.is_closed else None
        if found is None:  # stop by stop
            self._items = list(map(strong, as_jax(self._items)))
            current_worker().wait_for_arguments(self._items)
            found = self._bundle.value.walk(self._items, self._stop)
            self._running = None
        return ArrayBlock(found)

    def _at_once(self) -> list[Any] | None:
        try:
            found = at_once(self._bundle.value, self._functions, self._items)
            jax.block_until_ready(found)  # raises here any error from computing them
        except Exception:
            self._looks_for_failure = True
            return None
        if found is not None and any(self._numbers):  # note answers, as if each call had been answered on its own
            each = zip(self._functions, self._numbers, strict=True)
            answers = [(next_message(), mine[0], function) for function, mine in each if function is not None and mine]
            links = current_tape(lambda: self.label).links
            links.note(lambda: [answer(message, call, describe(function)) for message, call, function in answers])
        return found

    def _stop(self, turn: int, items: list[Any]) -> list[Any]:
        self._running = turn
        task, since, failed = self._task(turn), time.monotonic(), True
        try:
            arrays = self._bundle.value.stops[turn].run(task, items)
            if self._looks_for_failure:
                jax.block_until_ready(arrays)
            failed = False
            return arrays
        finally:
            if len(self._functions) > 1:
                task_served(task, current_worker().info, since, failed=failed)

    def _task(self, turn: int) -> Any:
        return self._bundle.value.stops[turn].task(self._functions[turn], self._numbers[turn], (*self._place, turn))


OWN.add(BundleRun)
