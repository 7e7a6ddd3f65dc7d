"""A derivative, the derivative of that, and so on: their pullbacks, from one run of a function.

JAX derives a derivative's forward pass: what ``jax.vjp(f, x)`` returns first, which by a custom rule is the result of
the rule's forward function. To run the function again, as if that were the same, would derive it by its custom rule.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

Orders = tuple[tuple[int, ...], ...]  # what each derivative is taken with respect to, the innermost first

Primal = Callable[..., tuple[list[Any], Any]]  # returns results that have derivatives, and anything beside


def differentiated(primal: Primal, operands: Sequence[Any], orders: Orders) -> tuple[list[Any], list[Any], Any]:
    """A function's results, a pullback for each order, and what the function returns beside.

    A pullback takes the cotangents of the results, in a list, to those of the operands that its order names.
    """
    if not orders:
        results, beside = primal(*operands)
        return results, [], beside
    *inner, outermost = orders

    def forward(*variables: Any) -> tuple[list[Any], Any]:
        given = dict(enumerate(operands)) | dict(zip(outermost, variables, strict=True))
        results, pullbacks, beside = differentiated(primal, list(given.values()), tuple(inner))
        return results, (pullbacks, beside)

    results, pullback, (pullbacks, beside) = jax.vjp(forward, *(operands[k] for k in outermost), has_aux=True)
    return results, [*pullbacks, pullback], beside


def named_among(positions: Sequence[int], orders: Orders) -> Orders:
    """The same orders, where they name leaves by their numbers: as places among operands, of which these are leaves."""
    return tuple(tuple(place for place, leaf in enumerate(positions) if leaf in order) for order in orders)
