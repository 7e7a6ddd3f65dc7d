"""Reading the gradients of this worker's values from a context, and writing their averages back."""

from collections.abc import Sequence
from typing import Any

import jax

from jdistgrad.autograd.contexts import Context, find_context
from jdistgrad.autograd.tape.contributions import value_gradient
from jdistgrad.autograd.tape.ledger import REFERENCE, Target
from jdistgrad.autograd.values.holes import has_gradient
from jdistgrad.rpc import trees
from jdistgrad.rpc.current import within
from jdistgrad.rpc.references.rref import RRef


def read(ctx: Context | int, rrefs: Sequence[RRef[Any]]) -> list[Any]:
    """Return each value's gradient: zeros if nothing was contributed, with None for leaves without a derivative."""
    with within(find_context(ctx).scope):
        return [_gradient(rref) for rref in rrefs]


def write(ctx: Context | int, rrefs: Sequence[RRef[Any]], gradients: Sequence[Any]) -> None:
    """Replace the values' gradients in a context."""
    ledger = find_context(ctx).tape.ledger
    for rref, gradient in zip(rrefs, gradients, strict=True):
        ledger.write(Target(REFERENCE, rref.id), jax.tree.leaves(gradient))


def _gradient(rref: RRef[Any]) -> Any:
    value, found = rref.local_value(), value_gradient(rref.id)
    floats = trees.map_leaves(lambda leaf: leaf if has_gradient(leaf) else None, value if found is None else found)
    return jax.tree.map(jax.numpy.zeros_like, floats) if found is None else floats
