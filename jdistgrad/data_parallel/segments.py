"""The program of a step: its trace, the order of its gradients, and its backward pass in segments."""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend import core

from jdistgrad import jaxprs
from jdistgrad._compat import lowered, trace_context
from jdistgrad.collectives.descriptions import describe, flatten, removed, require_inexact, static_parts
from jdistgrad.collectives.spanning import Span
from jdistgrad.errors import CollectiveError
from jdistgrad.leaves import as_jax_array
from jdistgrad.rpc.current import once_for_all
from jdistgrad.rpc.functions import Args, Kwargs
from jdistgrad.rpc.handles import without_handles

T = TypeVar("T")


class Trace(NamedTuple):
    """The jaxpr of ``value_and_grad``. Its outputs: first the leaves of the gradients, then those of (value, aux).

    ``static``: the static parts of the parameters, with functions among their leaves. ``parameters``: the arguments'
    leaves that it was traced with, in the order of the gradients.
    """

    closed: Any
    gradients: Any
    results: Any
    used: tuple[bool, ...]
    static: tuple[str, ...]
    parameters: Sequence[Any]


def trace(
    loss: Callable[..., Any],
    argnums: int | Sequence[int],
    args: Args,
    kwargs: Kwargs,
    *,
    has_aux: bool,
    span: Span | None = None,
) -> Trace:
    """Trace a loss's value and gradients, with jitted functions inlined.

    Arguments:
      span: the devices that the loss's collectives reach; None: this rank's only.
    """
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    if max(numbers, default=0) >= len(args):
        raise TypeError(
            f"value_and_grad: argnums={argnums!r} names positional arguments, of which there are {len(args)}"
        )
    chosen = args[argnums] if isinstance(argnums, int) else [args[k] for k in numbers]
    require_inexact(describe(chosen), "value_and_grad")
    leaves, tree = jax.tree.flatten((args, kwargs))
    found: dict[str, Any] = {}

    def program(*leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, leaves)
        used: set[int] = set()
        value, gradients = jax.value_and_grad(_probed(loss, numbers, used), argnums, has_aux)(*args, **kwargs)
        found["static"] = static_parts(flatten(gradients)[1])
        flat, found["gradients"] = jax.tree.flatten(removed(gradients))
        rest, found["results"] = jax.tree.flatten(value)
        found["used"] = tuple(k in used for k in range(len(flat)))
        return [*flat, *rest]

    with span.tracing() if span is not None else contextlib.nullcontext():
        axes = span.axes if span is not None else ()
        nested = lowered(jax.make_jaxpr(program, axis_env=axes)(*leaves))
        evaluated = jax.make_jaxpr(lambda *xs: jaxprs.evaluate(nested.jaxpr, nested.consts, xs), axis_env=axes)
        closed = evaluated(*without_handles(leaves))
    if any(isinstance(value, jax.core.Tracer) for value in closed.consts):
        raise CollectiveError(
            "value_and_grad: the loss closes over a value that jax.grad or jax.vmap is tracing around this step. "
            "Pass it as an argument of the step."
        )
    return Trace(closed, **found, parameters=jax.tree.leaves(chosen))


def _probed(loss: Callable[..., Any], numbers: Sequence[int], used: set[int]) -> Callable[..., Any]:
    """Return the loss with a probe on each parameter leaf, which adds to ``used`` the leaves that get a cotangent."""

    @functools.wraps(loss)
    def probed(*args: Any, **kwargs: Any) -> Any:
        parts, tree = jax.tree.flatten([args[k] for k in numbers])
        parts = [_probe(functools.partial(used.add, k), part) for k, part in enumerate(parts)]
        replaced = list(args)
        for k, value in zip(numbers, jax.tree.unflatten(tree, parts), strict=True):
            replaced[k] = value
        return loss(*replaced, **kwargs)

    return probed


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _probe(note: Callable[[], None], x: Any) -> Any:
    return x


def _probe_forward(note: Callable[[], None], x: Any) -> tuple[Any, None]:
    return x.value, None


def _probe_backward(note: Callable[[], None], _: None, cotangent: Any) -> tuple[Any]:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return (None,)
    note()
    return (cotangent,)


_probe.defvjp(_probe_forward, _probe_backward, symbolic_zeros=True)


def readiness(closed: Any, count: int) -> list[int]:
    """Return the first ``count`` outputs in the order of their equations; among equals, the last first."""
    position = {var: k for k, equation in enumerate(closed.jaxpr.eqns) for var in equation.outvars}

    def key(index: int) -> tuple[int, int]:
        var = closed.jaxpr.outvars[index]
        return (-1 if isinstance(var, core.Literal) else position.get(var, -1), -index)

    return sorted(range(count), key=key)


class StepPrograms:
    """The compiled steps of one loss, by their kind and the shapes of the loss's arguments."""

    def __init__(self, loss: Callable[..., Any], argnums: int | Sequence[int], *, has_aux: bool):
        self._loss, self._has_aux = loss, has_aux
        given: Any = argnums
        several = isinstance(argnums, Sequence)
        self.argnums: int | tuple[int, ...] = tuple(map(operator.index, given)) if several else operator.index(given)
        self._found: dict[Any, Any] = {}
        self.differentiated = jax.value_and_grad(loss, argnums, has_aux)
        self.local = jax.jit(self.differentiated)

    def find(self, inputs: tuple[Args, Kwargs], kind: Any, make: Callable[[Trace], T], span: Span | None = None) -> T:
        """Return what ``make`` makes of the traced step: the same for the same kind and shapes.

        Arguments:
          span: the devices that the step's collectives reach; None: this rank's only.
        """
        leaves, tree = jax.tree.flatten(inputs)
        key = tree, kind, trace_context(), tuple(map(jax.typeof, leaves))
        if key not in self._found:
            traced = trace(self._loss, self.argnums, *inputs, has_aux=self._has_aux, span=span)
            self._found[key] = make(traced)
        found: T = self._found[key]
        return found


_shared = jaxprs.Shared(1024)


Run = Callable[..., tuple[list[Any], list[Any]]]
Variables = tuple[Any, ...]
Segment = tuple[Run, Variables, Variables, Variables]  # with its inputs, those it returns for others, and the last uses


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
        """Dispatch every segment; call ``computed`` with its gradients, which may not be ready yet."""
        values = self.begin(args)
        for number in range(len(self.segments)):
            computed(self.run(number, values))
        # A result may be a constant or an argument, of NumPy's type or of JAX's type for literals.
        return [as_jax_array(jaxprs.read(values, var)) for var in self._results]

    def begin(self, args: Sequence[Any]) -> dict[Any, Any]:
        """Return the values that the first segment starts from, for ``run``."""
        return dict(zip([*self._jaxpr.constvars, *self._jaxpr.invars], [*self._consts, *args], strict=True))

    def run(self, number: int, values: dict[Any, Any]) -> list[jax.Array]:
        """Dispatch the next segment and return its gradients. Update ``values`` for later segments."""
        run, inputs, returned, last_uses = self.segments[number]
        kept, gradients = run(*[values[var] for var in inputs])
        values.update(zip(returned, kept, strict=True))
        for var in last_uses:
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
    segments: list[Segment] = []
    for k, (part, group) in enumerate(zip(equations, groups, strict=True)):
        made = {var for equation in part for var in equation.outvars}
        kept = tuple(var for var in dict.fromkeys(v for need in needs[k + 1 :] for v in need) if var in made)
        kept += tuple(var for var in dict.fromkeys(rest) if var in made and var not in kept)
        dying = tuple(var for var in needs[k] if last[var] == k and var not in keep)
        outputs = [jaxpr.outvars[leaf] for leaf in group]
        segments.append((_compiled(part, needs[k], kept, outputs), tuple(needs[k]), kept, dying))
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
