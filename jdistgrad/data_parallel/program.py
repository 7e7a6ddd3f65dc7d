"""A loss, traced for the shapes it was called with, and compiled by whoever drives its steps.

The trace is one flat jaxpr of the value and the gradients, with the parameters that the loss depends on.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend import core

from jdistgrad import jaxprs
from jdistgrad._compat import lowered, trace_context
from jdistgrad.collectives.leaves import describe, flatten, require_inexact
from jdistgrad.collectives.spanning import Span
from jdistgrad.collectives.static_parts import removed, static_parts
from jdistgrad.errors import CollectiveError
from jdistgrad.rpc.functions import Args, Kwargs
from jdistgrad.rpc.handles import without_handles

T = TypeVar("T")


class Trace(NamedTuple):
    """The jaxpr of ``value_and_grad``. Its outputs: first the leaves of the gradients, then those of (value, aux).

    ``static``: the static parts of the parameters, functions among their leaves included. ``parameters``: the leaves of
    the arguments that it was traced for, in the order of the gradients.
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
    """Return the loss with a probe on each parameter leaf, which notes in ``used`` that it gets a cotangent."""

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
    """Return the first ``count`` outputs in the order the equations produce them; among equals, the last first."""
    position = {var: k for k, equation in enumerate(closed.jaxpr.eqns) for var in equation.outvars}

    def key(index: int) -> tuple[int, int]:
        var = closed.jaxpr.outvars[index]
        return (-1 if isinstance(var, core.Literal) else position.get(var, -1), -index)

    return sorted(range(count), key=key)


class Programs:
    """The compiled steps of one loss, by their kind and the shapes of the loss's arguments."""

    def __init__(self, loss: Callable[..., Any], argnums: int | Sequence[int], *, has_aux: bool):
        self._loss, self._has_aux = loss, has_aux
        self.argnums: int | tuple[int, ...]
        if isinstance(argnums, Sequence):
            self.argnums = tuple(map(operator.index, argnums))
        else:
            self.argnums = operator.index(argnums)
        self._found: dict[Any, Any] = {}
        self.differentiated = jax.value_and_grad(loss, argnums, has_aux)
        self.local = jax.jit(self.differentiated)

    def find(self, args: Args, kwargs: Kwargs, kind: Any, make: Callable[[Trace], T], span: Span | None = None) -> T:
        """Return what ``make`` makes of the traced step: the same for the same kind and shapes.

        Arguments:
          span: the devices that the step's collectives reach; None: this rank's only.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = tree, kind, trace_context(), tuple(map(jax.typeof, leaves))
        if key not in self._found:
            traced = trace(self._loss, self.argnums, args, kwargs, has_aux=self._has_aux, span=span)
            self._found[key] = make(traced)
        found: T = self._found[key]
        return found
