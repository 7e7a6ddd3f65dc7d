"""Runs of bundles on the worker they are sent to: as one compiled function where possible, else stop by stop."""

import functools
import time
from collections.abc import Sequence
from typing import Any

from jdistgrad import events
from jdistgrad.autograd.callee.bundle import Bundle
from jdistgrad.autograd.callee.compiled_bundle import at_once
from jdistgrad.autograd.tape import links
from jdistgrad.autograd.tape.links import Link, next_message
from jdistgrad.autograd.tape.program_order import Place
from jdistgrad.autograd.tape.tape import current_tape
from jdistgrad.autograd.values.results import as_jax, strong
from jdistgrad.rpc.by_value import OWN
from jdistgrad.rpc.cached import Cached
from jdistgrad.rpc.calls.events import task_served
from jdistgrad.rpc.functions import ServedFunction, describe
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.arrays import ArrayBlock


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
        return ArrayBlock(self._by_turns() if found is None else found)

    def _at_once(self) -> list[Any] | None:
        try:
            found = at_once(self._bundle.value, self._functions, self._items)
            wait_for(found or ())
        except Exception:
            self._looks_for_failure = True
            return None
        if found is not None and any(self._numbers):
            self._note_answers()
        return found

    def _note_answers(self) -> None:
        """Note a link for the answer of each recorded call, as if each had been answered on its own."""
        each = zip(self._functions, self._numbers, strict=True)
        answers = [(next_message(), mine[0], function) for function, mine in each if function is not None and mine]
        current_tape(lambda: self.label).links.add_later(functools.partial(_links, answers))

    def _by_turns(self) -> list[Any]:
        self._items = list(map(strong, as_jax(self._items)))
        current_worker().wait_for_arguments(self._items)
        found = self._bundle.value.walk(self._items, self._stop)
        self._running = None
        return found

    def _stop(self, turn: int, items: list[Any]) -> list[Any]:
        self._running = turn
        task, since, failed = self._task(turn), time.monotonic(), True
        try:
            arrays = self._bundle.value.stops[turn].run(task, items)
            if self._looks_for_failure:
                wait_for(arrays)
            failed = False
            return arrays
        finally:
            if len(self._functions) > 1:
                task_served(task, current_worker().info, since, failed=failed)

    def _task(self, turn: int) -> Any:
        return self._bundle.value.stops[turn].task(self._functions[turn], self._numbers[turn], (*self._place, turn))


OWN.add(BundleRun)


def wait_for(arrays: Sequence[Any]) -> None:
    """Wait for arrays, to raise here any error from computing them."""
    for array in arrays:
        array.block_until_ready()


def _links(answers: list[tuple[int, int, Any]]) -> list[Link]:
    return [links.answer(message, call, describe(function)) for message, call, function in answers]
