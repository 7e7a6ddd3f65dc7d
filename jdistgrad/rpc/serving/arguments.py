"""The replacement of references among the arguments of a call."""

import concurrent.futures
import math
from collections.abc import Callable
from typing import Any

from jdistgrad.rpc import trees
from jdistgrad.rpc.functions import Args, Kwargs
from jdistgrad.rpc.references.claims import StandIn
from jdistgrad.rpc.references.rref import ByReference, RRef


def delivered(args: Args, kwargs: Kwargs) -> Any:
    """Return the arguments for the called function: references replaced by their values, fetched all at once.

    There is no timeout here, because the call has one.
    """
    if trees.are_plain(args, kwargs):
        return args, kwargs
    fetched: dict[RRef[Any], concurrent.futures.Future[Any]] = {}

    def start(leaf: Any) -> Any:
        if isinstance(leaf, RRef) and leaf not in fetched:
            fetched[leaf] = leaf.value_future(math.inf)
        return leaf

    return with_values(trees.map_leaves(start, (args, kwargs)), lambda rref: fetched[rref].result())


def with_values(tree: Any, value_of: Callable[[RRef[Any]], Any]) -> Any:
    """Replace the references in a tree by their values, and references that were passed as such by themselves."""

    def deliver(leaf: Any) -> Any:
        if isinstance(leaf, RRef):
            return value_of(leaf)
        return leaf.rref if isinstance(leaf, ByReference) else leaf

    return trees.map_leaves(deliver, tree)


def replace_unmade(leaf: Any) -> Any:
    """Replace a reference whose value does not exist yet by a stand-in, in a call that only requests shapes.

    Other references get the handle with which they would arrive in another process: theirs is only a shape here.
    """
    if isinstance(leaf, ByReference):
        return ByReference(replace_unmade(leaf.rref))
    if isinstance(leaf, RRef) and leaf.token is not None:
        key: Any = leaf._claim.key
        return RRef._of(StandIn(key.owner, *key.results.known))
    return RRef._of(leaf._claim) if isinstance(leaf, RRef) else leaf
