"""Reading the gradients of this worker's values from a context, and writing their averages back."""

from collections.abc import Sequence
from typing import Any

import jax

from jdistgrad.autograd.callee.functions import own_parts
from jdistgrad.autograd.contexts import Context, find_context
from jdistgrad.autograd.tape.contributions import value_gradient
from jdistgrad.autograd.tape.ledger import REFERENCE, Target
from jdistgrad.autograd.values.holes import is_float_array
from jdistgrad.rpc import trees
from jdistgrad.rpc.current import within
from jdistgrad.rpc.references.rref import RRef


def read(ctx: Context | int, rrefs: Sequence[RRef[Any]]) -> list[Any]:
    """Return each value's gradient: zeros if nothing was contributed, with None for leaves without one of their own.

    These are leaves that have no derivative, and references, whose gradients are those of their own values.
    """
    with within(find_context(ctx).scope):
        return [_gradient(rref) for rref in rrefs]


def write(ctx: Context | int, rrefs: Sequence[RRef[Any]], gradients: Sequence[Any]) -> None:
    """Replace the values' gradients in a context."""
    tape = find_context(ctx).tape
    for rref, gradient in zip(rrefs, gradients, strict=True):
        own, new = own_parts(rref.local_value()), iter(jax.tree.leaves(gradient))
        before = tape.gradient(rref.id) or [None] * len(own)
        parts = [next(new) if mine else one for mine, one in zip(own, before, strict=True)]
        tape.ledger.write(Target(REFERENCE, rref.id), parts)


def _gradient(rref: RRef[Any]) -> Any:
    value, found = rref.local_value(), value_gradient(rref.id)
    floats = trees.map_leaves(lambda leaf: leaf if is_float_array(leaf) else None, value if found is None else found)
    return jax.tree.map(jax.numpy.zeros_like, floats) if found is None else floats
