"""Running the equations of a jaxpr one by one, as part of what is traced or at once."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

_CALLS = ("jit", "pjit")


def read(values: dict[Any, Any], atom: Any) -> Any:
    """The value of a variable, or of a literal."""
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def bind(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs of one equation, in the surroundings in which it was traced.

    These are what JAX's context managers set: where to compute, metadata for XLA, the kind of random bits.
    """
    primitive = equation.primitive
    with equation.ctx.manager:
        outputs = primitive.bind(*inputs, **primitive.get_bind_params(equation.params))
    return outputs if primitive.multiple_results else [outputs]


def surroundings(equation: Any) -> str:
    """What ``bind`` enters, comparable."""
    return repr(equation.ctx)


def run(equations: Sequence[Any], values: dict[Any, Any]) -> None:
    """Run equations on the values there are, and those of the jitted functions among them; add what they make."""
    for equation in equations:
        inputs = [read(values, atom) for atom in equation.invars]
        if equation.primitive.name in _CALLS:
            inner = equation.params["jaxpr"]
            outputs: Sequence[Any] = evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            outputs = bind(equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    run(jaxpr.eqns, values)
    return [read(values, atom) for atom in jaxpr.outvars]
