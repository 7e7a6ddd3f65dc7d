"""The backward pass in segments: each segment computes one bucket's gradients, as far as earlier segments have not.

XLA compiles a segment as a whole, so gradients become ready segment by segment. A cut costs the fusions that XLA could
have made across it, and a dispatch.

Gradients are later reduced in place. So each must be an array of its own that nothing else reads: a gradient that is an
input, that later segments need or that is an output twice is copied.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jdistgrad import jaxprs
from jdistgrad.rpc.current import once_for_all
from jdistgrad.wire.arrays import as_jax_array

_shared = jaxprs.Shared(1024)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Equations that run together. ``inputs``: the variables they need; ``kept``: their variables that others need."""

    run: Callable[..., tuple[list[Any], list[Any]]]
    inputs: tuple[Any, ...]
    kept: tuple[Any, ...]
    last_uses: tuple[Any, ...]


class Segmented:
    """A traced step, cut into segments.

    Arguments:
      closed: the step's jaxpr; its first ``sum(map(len, groups))`` outputs are the gradients.
      groups: the leaves of each segment, in order.
    """

    def __init__(self, closed: Any, groups: Sequence[Sequence[int]]):
        self._jaxpr = closed.jaxpr
        # A copy of NumPy constants: the program may change them later.
        self._consts = [as_jax_array(c) if isinstance(c, np.ndarray) else c for c in closed.consts]
        self._results = self._jaxpr.outvars[sum(map(len, groups)) :]
        rest = [var for var in self._results if not isinstance(var, core.Literal)]
        self.segments = _cut(self._jaxpr, groups, rest)

    def __call__(self, args: Sequence[Any], computed: Callable[[list[jax.Array]], None]) -> list[Any]:
        """Dispatch every segment, and call ``computed`` with its gradients, which may still be under way."""
        values = self.begin(args)
        for number in range(len(self.segments)):
            computed(self.run(number, values))
        # A result may be a constant or an argument, of JAX's own types for literals or of NumPy's.
        return [as_jax_array(jaxprs.read(values, var)) for var in self._results]

    def begin(self, args: Sequence[Any]) -> dict[Any, Any]:
        """Return the values that the first segment starts from, for ``run``."""
        return dict(zip([*self._jaxpr.constvars, *self._jaxpr.invars], [*self._consts, *args], strict=True))

    def run(self, number: int, values: dict[Any, Any]) -> list[jax.Array]:
        """Dispatch the next segment and return its gradients. It changes ``values`` to what later segments need."""
        segment = self.segments[number]
        kept, gradients = segment.run(*[values[var] for var in segment.inputs])
        values.update(zip(segment.kept, kept, strict=True))
        for var in segment.last_uses:
            del values[var]
        return gradients


def _cut(jaxpr: Any, groups: Sequence[Sequence[int]], rest: list[Any]) -> list[Segment]:
    owner = _assign(jaxpr, groups, rest)
    equations: list[list[Any]] = [[] for _ in groups]
    for equation, segment in zip(jaxpr.eqns, owner, strict=True):
        if segment is not None:
            equations[segment].append(equation)
    needs = [_free(part, [jaxpr.outvars[k] for k in group]) for part, group in zip(equations, groups, strict=True)]
    inputs = {*jaxpr.constvars, *jaxpr.invars}
    needs[0] += [var for var in dict.fromkeys(rest) if var in inputs and var not in needs[0]]
    last = {var: k for k, need in enumerate(needs) for var in need}
    keep = set(rest)
    segments = []
    for k, (part, group) in enumerate(zip(equations, groups, strict=True)):
        made = {var for equation in part for var in equation.outvars}
        kept = tuple(var for var in dict.fromkeys(v for need in needs[k + 1 :] for v in need) if var in made)
        kept += tuple(var for var in dict.fromkeys(rest) if var in made and var not in kept)
        dying = tuple(var for var in needs[k] if last[var] == k and var not in keep)
        outputs = [jaxpr.outvars[leaf] for leaf in group]
        segments.append(Segment(_compiled(part, tuple(needs[k]), kept, outputs), tuple(needs[k]), kept, dying))
    return segments


def _assign(jaxpr: Any, groups: Sequence[Sequence[int]], rest: list[Any]) -> list[int | None]:
    """Return each equation's segment: the first that needs it. Equations with effects all run, in their order."""
    maker = {var: k for k, equation in enumerate(jaxpr.eqns) for var in equation.outvars}
    effectful = [k for k, equation in enumerate(jaxpr.eqns) if equation.effects]
    before = dict(zip(effectful[1:], effectful, strict=False))
    owner: list[int | None] = [None] * len(jaxpr.eqns)

    def claim(segment: int, wanted: list[int]) -> None:
        while wanted:
            number = wanted.pop()
            if owner[number] is None:
                owner[number] = segment
                wanted += [
                    maker[v] for v in jaxpr.eqns[number].invars if not isinstance(v, core.Literal) and v in maker
                ]
                wanted += [before[number]] if number in before else []

    claim(0, [maker[var] for var in rest if var in maker])
    for segment, group in enumerate(groups):
        outputs = [jaxpr.outvars[leaf] for leaf in group]
        claim(segment, [maker[var] for var in outputs if not isinstance(var, core.Literal) and var in maker])
    claim(len(groups) - 1, effectful)
    return owner


def _free(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return the variables that equations and outputs need from outside."""
    made = {var for equation in equations for var in equation.outvars}
    wanted = [var for equation in equations for var in equation.invars] + list(outputs)
    return list(dict.fromkeys(v for v in wanted if not isinstance(v, core.Literal) and v not in made))


def _compiled(
    equations: Sequence[Any], inputs: Sequence[Any], kept: Sequence[Any], outputs: Sequence[Any]
) -> Callable[..., Any]:
    """Return a segment as one jitted function. Equal segments of all workers of this process share one."""
    if jaxprs.calls_back(equations):
        return jax.jit(_evaluation(equations, inputs, kept, outputs))  # for one worker, and only as long as the step
    names = jaxprs.Names()
    key = jaxprs.key(equations, inputs, outputs, names), tuple(map(names, kept))
    run: Callable[..., Any] = _shared.get(key, lambda: jax.jit(_evaluation(equations, inputs, kept, outputs)))
    return once_for_all(run)


def _evaluation(
    equations: Sequence[Any], inputs: Sequence[Any], kept: Sequence[Any], outputs: Sequence[Any]
) -> Callable[..., Any]:
    shared = {*inputs, *kept}

    def segment(*args: Any) -> tuple[list[Any], list[Any]]:
        values = dict(zip(inputs, args, strict=True))
        jaxprs.run(equations, values)
        config: Any = jax.config
        taken, gradients, eager = set(shared), [], config.jax_disable_jit  # then two variables may be one array
        for var in outputs:
            value = jaxprs.read(values, var)
            fresh = not isinstance(var, core.Literal) and var not in taken and not eager
            gradients.append(value if fresh else jax.numpy.copy(value))
            if fresh:
                taken.add(var)
        return [values[var] for var in kept], gradients

    return segment
