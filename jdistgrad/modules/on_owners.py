"""Trees of references: fetch their values, or compute with them on their owners."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd.callee.contributions import gradient_of
from jdistgrad.autograd.gradients import RemoteGradient
from jdistgrad.errors import DifferentiationError
from jdistgrad.modules.function import RemoteFunction
from jdistgrad.rpc import api, trees
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.functions import shown_as
from jdistgrad.rpc.rref import RRef, by_reference
from jdistgrad.rpc.worker import current_worker


def get(tree: Any, *, timeout: float | None = None) -> Any:
    """Return a tree with copies of values in place of references, as ``jax.device_get`` does for arrays on devices.

    A gradient of a reference becomes the gradient of its value, and a ``RemoteModule`` or ``RemoteFunction`` what its
    ``variables()`` returns. Each owner is asked once, all at the same time. Other leaves stay as they are. A derivative
    goes through to the values of references.

    Arguments:
      tree: any pytree, or a single reference.
      timeout: seconds to wait; default the world's.

    Example:
      >>> params = jd.get({"encoder": enc, "decoder": dec})
    """

    def is_function(node: Any) -> bool:
        return isinstance(node, RemoteFunction) and isinstance(node.parameters, RRef)

    apart = jax.tree.map(
        lambda node: node.references if is_function(node) else node,
        tree,
        is_leaf=lambda node: _is_reference(node) or is_function(node),
    )
    leaves, structure = jax.tree.flatten(apart, is_leaf=_is_reference)
    if not trace_state_clean():
        fetched = [leaf.to_here(timeout) if _is_reference(leaf) else leaf for leaf in leaves]
        return jax.tree.unflatten(structure, fetched)
    scopes: list[Any] = [leaf.checked_scope() for leaf in leaves if isinstance(leaf, RemoteGradient)] or [
        current_scope()
    ]
    asked: dict[tuple[int, Any], list[tuple[int, Any]]] = collections.defaultdict(list)
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, RemoteGradient):
            asked[leaf.owner.rank, leaf.scope].append((k, leaf.identified()))
        elif isinstance(leaf, RRef):
            asked[leaf.owner.rank, scopes[0]].append((k, by_reference(leaf)))
    answers = []
    for (owner, scope), mine in asked.items():
        numbers, wanted = zip(*mine, strict=True)
        with within(scope):
            answers.append((numbers, api.rpc_async(owner, _values, (wanted,), timeout=timeout)))
    for numbers, answer in answers:
        for k, value in zip(numbers, answer.result(), strict=True):
            leaves[k] = value
    return jax.tree.unflatten(structure, leaves)


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any, in_place: bool = False) -> Any:
    """Map over the values of references as ``jax.tree.map`` does, where they are, and return new references.

    ``f`` gets the arrays of the values. The owner of each reference in ``tree`` maps it, all owners at the same time;
    the corresponding leaves of the other trees (references to values anywhere, gradients of references, arrays) are
    sent to that owner. Other leaves of ``tree`` are mapped here. The result has the structure of ``tree``, with new
    references: ``jd.get`` fetches their values. The map can be differentiated.

    Arguments:
      f: a function as for ``rpc_sync``, of as many arguments as there are trees.
      tree: a pytree of references, modules and arrays, or a single one.
      rest: trees of the same structure.
      in_place: let the results take the place of the values of references in ``tree``, and return these references.
        ``jd.jit`` traces a function once for each reference: in a loop, pass it the same ones.

    Example:
      >>> target = jd.tree_map(jnp.copy, [enc, dec])                              # a target network
      >>> target = jd.tree_map(lambda t, p: 0.9 * t + 0.1 * p, target, [enc, dec])  # a moving average
      >>> jd.tree_map(jnp.tanh, [enc, dec], in_place=True)
      >>> decay = sum(jd.get(jd.tree_map(lambda p: jnp.sum(p**2), [enc, dec])))     # weight decay
    """
    if not callable(f):
        raise TypeError(f"tree_map takes a function and trees, as in tree_map(jnp.copy, params), not {f!r:.60} first")
    if in_place and not trace_state_clean():
        raise DifferentiationError("tree_map(in_place=True) changes values. Call it outside of jax.grad, jit, jd.jit.")
    leaves: list[Any]
    structure: Any
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_reference)
    references = list(filter(_is_reference, leaves))
    if in_place and len(set(references)) < len(references):
        raise ValueError("tree_map(in_place=True) would change a value twice: pass a tree with each reference once.")
    others = zip(*(structure.flatten_up_to(one) for one in rest), strict=True) if rest else [()] * len(leaves)

    def mapped(leaf: Any, others: Sequence[Any]) -> Any:
        if not _is_reference(leaf):
            return jax.tree.map(f, leaf, *get(list(others)))
        first, *rest = jax.tree.map(_at_hand, (leaf, *others), is_leaf=_is_reference)
        if in_place:
            return api.remote(leaf.owner, _map_in_place, (f, by_reference(first), *rest))
        return api.remote(leaf.owner, jax.tree.map, (f, first, *rest))

    found = list(map(mapped, leaves, others))
    if in_place:
        for k, leaf in enumerate(leaves):
            if _is_reference(leaf):
                found[k].creation().result()
                found[k] = leaf
    return jax.tree.unflatten(structure, found)


def _at_hand(leaf: Any) -> Any:
    """Return a reference to a gradient's value in place of a gradient."""
    if not isinstance(leaf, RemoteGradient):
        return leaf
    with within(leaf.checked_scope()):
        return api.remote(leaf.owner, gradient_of, leaf.identified())


@shown_as("a map in place")
def _map_in_place(f: Callable[..., Any], reference: RRef[Any], *rest: Any) -> None:
    owned = current_worker().references.owned
    with owned.lock(reference.id):  # of several that change the value, each must see what the one before has made
        owned.replace(reference.id, jax.tree.map(f, reference.local_value(), *rest))


def _values(wanted: Sequence[Any]) -> list[Any]:
    """Return copies of the values of references, and gradients by their ids; runs on the owner."""
    return trees.steady([one.to_here() if isinstance(one, RRef) else gradient_of(*one) for one in wanted])


def _is_reference(node: Any) -> bool:
    return isinstance(node, RRef | RemoteGradient)
