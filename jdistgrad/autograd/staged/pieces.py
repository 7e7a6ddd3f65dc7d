"""The compiled local pieces of a step. Pieces with the same equations share one jitted function."""

from collections.abc import Callable
from typing import Any

import jax

from jdistgrad import jaxprs
from jdistgrad.autograd.staged.constants import SMALL
from jdistgrad.autograd.staged.equations import Constant
from jdistgrad.autograd.staged.plan import Unit
from jdistgrad.rpc.current import once_for_all

_shared = jaxprs.Shared(4096)


def compiled(unit: Unit) -> Callable[..., list[Any]]:
    """Return a piece as one jitted function of its inputs."""
    if jaxprs.calls_back(equation.eqn for equation in unit.equations):
        return jax.jit(_evaluation(unit))  # for one worker, and only as long as the step
    if _bytes_held(unit) > SMALL:
        return once_for_all(jax.jit(_evaluation(unit)))  # who shared it would keep these arrays
    run: Callable[..., list[Any]] = _shared.get(key(unit), lambda: jax.jit(_evaluation(unit)))
    return once_for_all(run)


def _bytes_held(unit: Unit) -> int:
    """Return the size of the arrays that the step has closed over and that a piece computes with."""
    held = [atom.value for one in unit.equations for atom in one.inputs if isinstance(atom, Constant)]
    held += [value for one in unit.equations for value in jaxprs.arrays_in(one.eqn)]
    return sum(getattr(value, "nbytes", 0) for value in held)


def _evaluation(unit: Unit) -> Callable[..., list[Any]]:
    def run(*inputs: Any) -> list[Any]:
        known = dict(zip(unit.inputs, inputs, strict=True))
        for equation in unit.equations:
            values = [atom.value if isinstance(atom, Constant) else known[atom] for atom in equation.inputs]
            known.update(zip(equation.outputs, equation.evaluate(values), strict=True))
        return [known[output] for output in unit.outputs]

    return run


def key(unit: Unit) -> Any:
    """Return a key of what a piece computes, independent of the names of its variables."""
    names = jaxprs.Names()

    def spell(atom: Any) -> Any:
        return jaxprs.constant_key(atom.value) if isinstance(atom, Constant) else names(atom)

    inputs = tuple(map(spell, unit.inputs))
    equations = tuple(
        (jaxprs.equation_key(one.eqn), tuple(map(spell, one.inputs)), tuple(map(spell, one.outputs)))
        for one in unit.equations
    )
    return inputs, equations, tuple(map(spell, unit.outputs))
