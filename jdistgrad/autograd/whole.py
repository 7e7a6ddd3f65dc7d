"""A closed route as one compiled function: what its stops hand to each other is XLA's business."""

from typing import Any

import jax

from jdistgrad.autograd.compiling import Outputs
from jdistgrad.autograd.equations import has_wire
from jdistgrad.autograd.recording import Recording
from jdistgrad.autograd.routes import PullStop, Route

VARIANTS = 16  # of one route: where functions are ever different ones, compiling them makes no sense


class Whole:
    """A route with its functions, compiled once per shape."""

    def __init__(self, route: Route, functions: tuple[Any, ...]):
        def run(items: list[Any]) -> Outputs:
            recordings: dict[int | None, Recording] = {}

            def stop(turn: int, items: list[Any]) -> list[Any]:
                one, function = route.stops[turn], functions[turn]
                if isinstance(one, PullStop):
                    return recordings.pop(one.call).cotangents(one.task(None, (0, 0), ()), items)
                if one.wanted is None:
                    return one.run(function, items)
                recordings[turn] = one.recorded(function, items)
                return one.arrays(recordings[turn].result)

            return Outputs.of(route.walk([*items], stop), items)

        self._run = jax.jit(run)
        self._fits: bool | None = None

    def __call__(self, items: list[Any]) -> list[Any] | None:
        if self._fits is None:
            self._fits = self._can_run(items)
        return self._run(items).filled(items) if self._fits else None

    def _can_run(self, items: list[Any]) -> bool:
        """Whether it can be traced as a whole, and neither calls other workers nor has any side effect."""
        try:
            traced = self._run.trace(items).jaxpr
        except Exception:  # stop by stop, what is wrong will be told of the one it is wrong with
            return False
        return not traced.effects and not has_wire(traced.jaxpr)


def at_once(route: Route, functions: list[Any], items: list[Any]) -> list[Any] | None:
    """The wanted arrays, made by one compiled function; None where the stops must be made one by one."""
    key = tuple(map(id, functions))  # which a compiled one keeps alive
    found = route.compiled.get(key)
    if found is None:
        if len(route.compiled) == VARIANTS:
            return None
        found = route.compiled[key] = Whole(route, tuple(functions))
    return found(items)
