"""Pullbacks of a function's first and higher derivatives, all from one run of the function.

For a higher derivative, JAX differentiates the forward pass of the lower one, ``jax.vjp(f, x)[0]``. If the function has
a custom rule, this forward pass is the rule's forward function. Running the function again instead would not be the
same: JAX would differentiate that run by the custom rule.

Also the outputs of compiled code, and the errors of functions that JAX cannot trace.
"""

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jdistgrad.autograd.values.holes import as_jax
from jdistgrad.errors import DifferentiationError, DistgradError
from jdistgrad.leaves import as_jax_array
from jdistgrad.rpc.functions import describe

Orders = tuple[tuple[int, ...], ...]  # the operands of each derivative, the innermost derivative first

Primal = Callable[..., tuple[list[Any], Any]]  # returns the results that have derivatives, and auxiliary data


def differentiated(primal: Primal, operands: Sequence[Any], orders: Orders) -> tuple[list[Any], list[Any], Any]:
    """Return a function's results, a pullback for each order, and the auxiliary data that the function returns.

    A pullback maps the cotangents of the results, in a list, to the cotangents of the operands that its order names.
    """
    if not orders:
        results, beside = primal(*operands)
        return results, [], beside
    *inner, outermost = orders

    def forward(*variables: Any) -> tuple[list[Any], Any]:
        given = dict(enumerate(operands)) | dict(zip(outermost, variables, strict=True))
        results, pullbacks, beside = differentiated(primal, list(given.values()), tuple(inner))
        return results, (pullbacks, beside)

    given = as_jax([operands[k] for k in outermost])
    results, pullback, (pullbacks, beside) = jax.vjp(forward, *given, has_aux=True)
    return results, [*pullbacks, pullback], beside


def pulled(pullback: Any, cotangents: Iterable[Any]) -> list[Any]:
    """Apply a pullback to cotangents, as arrays of JAX, for which users' custom rules are written."""
    return list(pullback(as_jax(list(cotangents))))


def transposed(pullback: Any, tangents: Sequence[Any], shapes: Iterable[Any]) -> list[Any]:
    """Return the tangents of results of these shapes and dtypes: the derivative is the pullback's transpose.

    Raises:
      DifferentiationError: the pullback has no transpose.
    """
    results = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    transpose = jax.linear_transpose(lambda cotangents: list(pullback(cotangents)), results)
    try:
        (found,) = transpose(as_jax(list(tangents)))
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, DistgradError | jax.errors.JaxRuntimeError):
            raise
        raise DifferentiationError(
            "there is no forward-mode derivative (jvp, jacfwd, linearize, hessian) of a function whose custom_vjp is "
            f"not linear in the cotangents, or cannot be transposed ({error}). Use reverse mode, or a custom_jvp."
        ) from error
    return list(found)


def named_among(positions: Sequence[int], orders: Orders) -> Orders:
    """Turn orders that name leaves into orders that name operands. ``positions`` gives each operand's leaf."""
    return tuple(tuple(place for place, leaf in enumerate(positions) if leaf in order) for order in orders)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Outputs:
    """The outputs of compiled code, without inputs among them and without repetitions, which XLA would copy.

    ``sources`` gives the place of each leaf of the tree among the inputs followed by ``made``.
    """

    made: list[Any]
    sources: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    tree: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, outputs: Any, inputs: Sequence[Any]) -> "Outputs":
        leaves, tree = jax.tree.flatten(outputs)
        places = {id(one): place for place, one in reversed([*enumerate(inputs)])}
        made = [one for one in {id(one): one for one in leaves}.values() if id(one) not in places]
        places |= {id(one): len(inputs) + k for k, one in enumerate(made)}
        return cls(made, tuple(places[id(one)] for one in leaves), tree)

    def filled(self, inputs: Sequence[Any]) -> Any:
        found = [*inputs, *self.made]
        return jax.tree.unflatten(self.tree, [as_jax_array(found[place]) for place in self.sources])


WANT_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
OTHERS = {"jax", "jdistgrad", "jaxlib", "numpy", "contextlib", "functools"}


@dataclasses.dataclass
class explained(contextlib.AbstractContextManager[Any, None]):  # noqa: N801 used like a function
    """Turn JAX's errors in a block about a function that cannot be traced into one error, with the user's line.

    A class, since a generator would add its frames to tracebacks.
    """

    function: Any

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, WANT_VALUES):
            why = "needs the value of an array"
        elif isinstance(error, ValueError) and "callbacks do not support" in str(error):
            why = "calls Python, without a derivative"
        else:
            return
        raise DifferentiationError(
            f"{describe(self.function)} cannot be traced: {_line(error)} {why}, but JAX traces a remote function that "
            "is differentiated or called in jit, without values. Compute with jax.numpy, put side effects into "
            "jax.debug.callback, give other callbacks a derivative (jax.custom_vjp), or call the function outside of "
            "grad and jit."
        ).with_traceback(trace) from None


def _line(error: BaseException) -> str:
    """Return the last line outside of JAX and this package that led to an error, and its place."""
    found = "a line"
    for frame, number in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).split(".")[0] not in OTHERS:
            summary = traceback.FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name)
            text = f"`{summary.line}` " if summary.line else ""
            found = f"{text}({summary.filename}:{number})"
    return found
