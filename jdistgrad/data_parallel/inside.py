"""Averaging inside one compiled step: pure, for every body of the collectives, synchronous."""

from collections.abc import Sequence
from typing import Any

import jax

from jdistgrad.data_parallel.arrays import is_traced
from jdistgrad.data_parallel.collectives import Collectives, Mesh
from jdistgrad.data_parallel.driver import Driver
from jdistgrad.data_parallel.hooks import average as plain_average, base as hooks
from jdistgrad.data_parallel.layout import Bucket, join_flat
from jdistgrad.data_parallel.leaves import flatten, is_sparse
from jdistgrad.data_parallel.rules import Rules
from jdistgrad.data_parallel.sparse import reduce_sparse
from jdistgrad.errors import CollectiveError, HookError, LeafError


class Inside:
    """Averages as functions of gradients and the hook's states, which become part of a program where there is one.

    Arguments:
      driver: with whom the ranks agree on buckets; None on a mesh, where they are one program.
    """

    def __init__(self, collectives: Collectives, rules: Rules, driver: Driver | None):
        self._collectives, self._rules, self._driver = collectives, rules, driver
        self._hook = rules.hook or plain_average()

    def _buckets(self, tree: Any) -> Sequence[Bucket]:
        if self._driver is None:
            return self._rules.plan(self._rules.terms(tree), None).buckets
        return self._driver.buckets(tree)

    def initial_states(self, tree: Any) -> list[Any]:
        """The hook's states for the buckets of a tree."""
        return [self._hook.init(bucket) for bucket in self._buckets(tree)]

    def average_with(self, gradients: Any, states: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The average of a tree of gradients, and the hook's new states. Pure; every rank must call it."""
        if self._rules.hook is None and self._driver is not None and not is_traced(gradients):
            return self._driver.average(gradients), list(states)
        leaves, structure = flatten(gradients)
        averaged, after = average(leaves, self._buckets(gradients), self._hook, states, self._collectives)
        return jax.tree.unflatten(structure, averaged), after

    def average(self, gradients: Any, *, joining: bool) -> Any:
        """The average of a tree of gradients, where nothing is kept from step to step."""
        if joining or self._rules.check_finite:
            raise CollectiveError(
                f"{'join' if joining else 'check_finite'}: inside jax.jit (and on a mesh) ranks cannot wait for "
                "each other's word before a bucket is reduced. Call the step from Python, without jax.jit."
            )
        states = self.initial_states(gradients)
        if jax.tree.leaves(states):
            raise HookError(
                f"the hook {self._rules.hook_name!r} has a state, and a step inside jit has nowhere to keep it. Use "
                "average_gradients(hook=...), whose state is the optimizer's, or call the step from Python."
            )
        return self.average_with(gradients, states)[0]


def localized(collectives: Collectives, args: tuple, argnums: int | Sequence[int]) -> list[Any]:
    """Arguments of which those to be differentiated are this rank's own: see ``Mesh.localize``."""
    if not isinstance(collectives, Mesh):
        return list(args)
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    return [jax.tree.map(collectives.localize, arg) if k in chosen else arg for k, arg in enumerate(args)]


def average(
    gradients: Sequence[Any], buckets: Sequence[Bucket], hook: hooks.Hook, states: Sequence[Any], all_: Collectives
) -> tuple[list[Any], list[Any]]:
    """The averages of gradients over all ranks, by leaf, and the hook's new states, by bucket."""
    averaged, after = list(gradients), []
    for bucket, state in zip(buckets, states, strict=True):
        own = [averaged[slot.index] for slot in bucket.slots]
        found, state = _bucket(bucket, own, hook, state, all_)
        for slot, value in zip(bucket.slots, found, strict=True):
            averaged[slot.index] = value
        after.append(state)
    return averaged, after


def _bucket(
    bucket: Bucket, own: Sequence[Any], hook: hooks.Hook, state: Any, all_: Collectives
) -> tuple[Sequence[Any], Any]:
    """On a mesh, what JAX has summed already (gradients of parameters typed as replicated) is only divided."""
    if is_sparse(own[0]):
        return [_rows(bucket, own[0], all_)], state
    summed = [isinstance(all_, Mesh) and all_.is_summed(gradient) for gradient in own]
    if any(summed):
        shares = [gradient / all_.size for gradient in own]
        return [x if flag else all_.allreduce(x) for x, flag in zip(shares, summed, strict=True)], state
    flat, state = hooks.reduce(hook, bucket.filled(join_flat(own), all_.size), state, all_)
    return bucket.views(flat), state


def _rows(bucket: Bucket, gradient: Any, all_: Collectives) -> Any:
    slot = bucket.slots[0]
    if isinstance(all_, Mesh) or is_traced(gradient):
        raise LeafError(
            f"the gradient {slot.path} is sparse (BCOO), expected a dense array: a compiled step knows no ranks with "
            "different numbers of rows. Give it gradient.todense(), or average it from Python.",
            path=slot.path,
        )
    return reduce_sparse(gradient, slot.shape, bucket.dtype, all_.size, all_)
