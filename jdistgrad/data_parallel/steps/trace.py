"""Tracing of a loss into one flat jaxpr of its value and gradients, with the parameters that it depends on."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jdistgrad import jaxprs
from jdistgrad._compat import lowered
from jdistgrad.data_parallel.buckets.functions import removed
from jdistgrad.data_parallel.buckets.leaves import flatten
from jdistgrad.data_parallel.buckets.static_parts import static_parts
from jdistgrad.rpc.functions import Args, Kwargs
from jdistgrad.rpc.references.handles import without_handles


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

    @property
    def like(self) -> Any:
        """The shapes and dtypes of the gradients."""
        avals = self.closed.out_avals[: self.gradients.num_leaves]
        return jax.tree.unflatten(self.gradients, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals])


def trace(
    loss: Callable[..., Any],
    argnums: int | Sequence[int],
    args: Args,
    kwargs: Kwargs,
    *,
    has_aux: bool,
    axes: Sequence[tuple[str, int]] = (),
) -> Trace:
    """Trace a loss's value and gradients, with jitted functions inlined.

    Arguments:
      axes: mesh axes that the loss's collectives may use, with their sizes.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    found: dict[str, Any] = {}

    def program(*leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, leaves)
        used: set[int] = set()
        probed = _probed(loss, argnums, used)
        value, gradients = jax.value_and_grad(probed, argnums, has_aux)(*args, **kwargs)
        found["static"] = static_parts(flatten(gradients)[1])
        flat, found["gradients"] = jax.tree.flatten(removed(gradients))
        rest, found["results"] = jax.tree.flatten(value)
        found["used"] = tuple(k in used for k in range(len(flat)))
        return [*flat, *rest]

    nested = lowered(jax.make_jaxpr(program, axis_env=axes)(*leaves))
    evaluated = jax.make_jaxpr(lambda *xs: jaxprs.evaluate(nested.jaxpr, nested.consts, xs), axis_env=axes)
    closed = evaluated(*without_handles(leaves))
    parameters = jax.tree.leaves([args[k] for k in ((argnums,) if isinstance(argnums, int) else argnums)])
    return Trace(closed, found["gradients"], found["results"], found["used"], found["static"], parameters)


def _probed(loss: Callable[..., Any], argnums: int | Sequence[int], used: set[int]) -> Callable[..., Any]:
    """Return the loss with a probe on each parameter leaf, which notes in ``used`` that it gets a cotangent."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

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
