"""A closed bundle as one compiled function: XLA optimizes across its stops."""

import collections
import threading
from typing import Any

import jax

from jdistgrad.autograd.callee.bundle import Bundle, PullStop
from jdistgrad.autograd.callee.pullbacks import Outputs
from jdistgrad.autograd.callee.recording import Recording
from jdistgrad.autograd.values.primitive import has_wire
from jdistgrad.autograd.values.results import strong

KEPT = 64  # compiled forms per bundle; compiling does not pay if the functions change every time


class CompiledBundle:
    """A bundle compiled together with its functions, once per shape."""

    def __init__(self, bundle: Bundle, functions: tuple[Any, ...]):
        def run(items: list[Any]) -> Outputs:
            recordings: dict[int | None, Recording] = {}

            def stop(turn: int, items: list[Any]) -> list[Any]:
                one, function = bundle.stops[turn], functions[turn]
                if isinstance(one, PullStop):
                    return recordings.pop(one.call).cotangents(one.order, one.live, items, one.maps)
                if not one.orders:
                    return one.run(function, items)
                recordings[turn] = one.recorded(function, items)
                return one.arrays(recordings[turn].result)

            return Outputs.of(bundle.walk(list(map(strong, items)), stop), items)

        self._run = jax.jit(run)
        self._fits: dict[Any, bool] = {}  # by the shapes and dtypes of the items

    def __call__(self, items: list[Any]) -> list[Any] | None:
        kinds = tuple([(one.shape, one.dtype) for one in items])
        fits = self._fits.get(kinds)
        if fits is None:
            fits = self._fits[kinds] = self._can_run(items)
        return self._run(items).filled(items) if fits else None

    def _can_run(self, items: list[Any]) -> bool:
        """Return whether the bundle can be traced as a whole, calls no other workers and has no side effects."""
        try:
            traced = self._run.trace(items).jaxpr
        except Exception:  # run stop by stop, the bundle will raise this error at the stop that causes it
            return False
        return not traced.effects and not has_wire(traced.jaxpr)


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
