"""Evaluation of a jaxpr equation by equation, eagerly or inside another trace."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

_CALLS = ("jit", "pjit")


def read(values: dict[Any, Any], atom: Any) -> Any:
    """Return the value of a variable or a literal."""
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def bind(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs of one equation, evaluated in the context in which it was traced.

    JAX's context managers set that context: where to compute, metadata for XLA, the kind of random bits.
    """
    primitive = equation.primitive
    with equation.ctx.manager:
        outputs = primitive.bind(*inputs, **primitive.get_bind_params(equation.params))
    return outputs if primitive.multiple_results else [outputs]


def context_key(equation: Any) -> str:
    """Return the context that ``bind`` enters for an equation, in a comparable form."""
    return repr(equation.ctx)


def run(equations: Sequence[Any], values: dict[Any, Any]) -> None:
    """Run equations on known values, jitted functions inlined, and add the outputs to ``values``."""
    for equation in equations:
        inputs = [read(values, atom) for atom in equation.invars]
        if equation.primitive.name in _CALLS:
            inner = equation.params["jaxpr"]
            outputs: Sequence[Any] = evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            outputs = bind(equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Return the outputs of a jaxpr."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    run(jaxpr.eqns, values)
    return [read(values, atom) for atom in jaxpr.outvars]
