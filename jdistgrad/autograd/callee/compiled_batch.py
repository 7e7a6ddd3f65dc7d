"""A closed route as one compiled function: what its stops hand to each other is XLA's business."""

import collections
import threading
from typing import Any

import jax

from jdistgrad.autograd.callee.batch import PullStop, Route
from jdistgrad.autograd.callee.pullbacks import Outputs
from jdistgrad.autograd.callee.recording import Recording
from jdistgrad.autograd.values.primitive import has_wire
from jdistgrad.autograd.values.results import strong

KEPT = 64  # of one route; where functions are ever different ones, compiling them makes no sense


class Whole:
    """A route with its functions, compiled once per shape."""

    def __init__(self, route: Route, functions: tuple[Any, ...]):
        def run(items: list[Any]) -> Outputs:
            recordings: dict[int | None, Recording] = {}

            def stop(turn: int, items: list[Any]) -> list[Any]:
                one, function = route.stops[turn], functions[turn]
                if isinstance(one, PullStop):
                    return recordings.pop(one.call).cotangents(one.order, one.live, items, one.maps)
                if not one.orders:
                    return one.run(function, items)
                recordings[turn] = one.recorded(function, items)
                return one.arrays(recordings[turn].result)

            return Outputs.of(route.walk(list(map(strong, items)), stop), items)

        self._run = jax.jit(run)
        self._fits: dict[Any, bool] = {}  # by the kinds of the items

    def __call__(self, items: list[Any]) -> list[Any] | None:
        kinds = tuple([(one.shape, one.dtype) for one in items])
        fits = self._fits.get(kinds)
        if fits is None:
            fits = self._fits[kinds] = self._can_run(items)
        return self._run(items).filled(items) if fits else None

    def _can_run(self, items: list[Any]) -> bool:
        """Whether it can be traced as a whole, and neither calls other workers nor has any side effect."""
        try:
            traced = self._run.trace(items).jaxpr
        except Exception:  # stop by stop, what is wrong will be told of the one it is wrong with
            return False
        return not traced.effects and not has_wire(traced.jaxpr)


class Wholes:
    """Those of one route: the ones used last. They keep their functions alive."""

    def __init__(self) -> None:
        self._found: collections.OrderedDict[tuple[int, ...], Whole] = collections.OrderedDict()
        self._made = self._used = 0
        self._lock = threading.Lock()

    def of(self, route: Route, functions: list[Any]) -> Whole | None:
        """None where most functions come only once."""
        key = tuple(map(id, functions))
        with self._lock:
            self._used += 1
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            elif self._made < KEPT or self._used > 2 * self._made:
                self._made += 1
                found = self._found[key] = Whole(route, tuple(functions))
                if len(self._found) > KEPT:
                    self._found.popitem(last=False)
            return found


def at_once(route: Route, functions: list[Any], items: list[Any]) -> list[Any] | None:
    """The wanted arrays, made by one compiled function; None where the stops must be made one by one."""
    if route.wholes is None:
        route.wholes = Wholes()
    whole = route.wholes.of(route, functions)
    return None if whole is None else whole(items)
