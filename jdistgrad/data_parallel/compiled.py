"""Averaging inside one compiled step: pure and synchronous, for all collectives."""

import contextlib
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import jax

from jdistgrad.collectives.base import Collectives
from jdistgrad.collectives.descriptions import flatten, is_sparse
from jdistgrad.collectives.host import HostCollectives
from jdistgrad.collectives.operations import divided
from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.agreement import Rules
from jdistgrad.data_parallel.buckets import Bucket, join_flat
from jdistgrad.errors import CollectiveError, HookError, LeafError
from jdistgrad.rpc.functions import Args

log = logging.getLogger("jdistgrad.data_parallel")


class CompiledAverage:
    """Averages as functions of gradients and the hook's states, which become part of a compiled program.

    Arguments:
      driver: plans the buckets with the other ranks; None on a mesh, where all ranks run one program.
    """

    def __init__(self, collectives: Collectives, rules: Rules, driver: Any):
        self._collectives, self._rules, self._driver = collectives, rules, driver
        self._hook = rules.hook or hooks.average()

    def initial_states(self, tree: Any) -> list[Any]:
        return [self._hook.init(bucket) for bucket in self._buckets(tree)]

    def average_with(self, gradients: Any, states: Sequence[Any], what: str = "average") -> tuple[Any, list[Any]]:
        """Return the average of a tree of gradients, and the hook's new states. Every rank must call it.

        If the buckets differ from those of ``initial_states``, the hook has no state, and ``states`` is returned.
        """
        if self._driver is not None and self._driver.reducer.votes:
            _say_what_does_not_go_on()
        leaves, structure = flatten(gradients)
        buckets = self._buckets(gradients)
        hooks.require_states(self._hook, states, buckets)
        before = states if len(states) == len(buckets) else [self._hook.init(bucket) for bucket in buckets]
        with self._section(what, buckets) as all_:
            averaged, after = average_buckets(buckets, leaves, before, self._rules.hook, all_)
        return jax.tree.unflatten(structure, averaged), after if len(after) == len(states) else list(states)

    def _section(self, what: str, buckets: Sequence[Bucket]) -> contextlib.AbstractContextManager[Collectives]:
        """Open a section, in which the ranks compare the plan's digest once, for all buckets."""
        if not isinstance(self._collectives, HostCollectives) or not buckets:
            return contextlib.nullcontext(self._collectives)
        leaves = [f"{slot.path} {bucket.dtype}{list(slot.shape)}" for bucket in buckets for slot in bucket.slots]
        digest = hashlib.blake2b(repr((leaves, self._rules.settings)).encode(), digest_size=8).hexdigest()
        rest = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
        return self._collectives.section(f"{what} of {', '.join(leaves[:3])}{rest} (plan {digest})")

    def average(self, gradients: Any, what: str = "average") -> Any:
        """Return the average of a tree of gradients, with no hook state kept from step to step.

        Arguments:
          what: "step" for a step's own gradients, "average" for given ones; all ranks must do the same.
        """
        rules = self._rules
        asked = {
            "join": self._driver is not None and self._driver.joining,
            "check_finite": rules.check_finite,
            "find_unused_parameters": rules.find_unused_parameters,
        }
        for name in filter(asked.get, asked):
            raise CollectiveError(
                f"{name}: inside jax.jit (and on a mesh) ranks exchange nothing but gradients. Call the step from "
                "Python, without jax.jit."
            )
        states = self.initial_states(gradients)
        if jax.tree.leaves(states):
            raise HookError(
                f"the hook {self._hook.name!r} has a state, and a step inside jit has nowhere to keep it. Use "
                "average_gradients(hook=...), whose state is the optimizer's, or call the step from Python."
            )
        return self.average_with(gradients, states, what)[0]

    def _buckets(self, tree: Any) -> Sequence[Bucket]:
        if self._driver is None:
            terms = self._rules.terms(tree)
            self._rules.require_averages(terms.leaves)
            return self._rules.plan(terms, None).buckets
        buckets: Sequence[Bucket] = self._driver.plan_for(tree).buckets
        return buckets


@functools.cache
def _say_what_does_not_go_on() -> None:
    log.warning(
        "averages inside jax.jit do not survive the death of a rank: they fail, or the job ends. Steps and averages "
        "that are called from Python survive it."
    )


def average_buckets(
    buckets: Sequence[Bucket], leaves: Sequence[Any], states: Sequence[Any], hook: hooks.Hook | None, all_: Collectives
) -> tuple[list[Any], list[Any]]:
    """Return the leaves averaged, and the hook's new state for each bucket."""
    averaged, after = list(leaves), []
    for bucket, state in zip(buckets, states, strict=True):
        found, state = _averaged(bucket, [leaves[slot.index] for slot in bucket.slots], state, hook, all_)
        for slot, value in zip(bucket.slots, found, strict=True):
            averaged[slot.index] = value
        after.append(state)
    return averaged, after


def _averaged(
    bucket: Bucket, own: Sequence[Any], state: Any, hook: hooks.Hook | None, all_: Collectives
) -> tuple[Sequence[Any], Any]:
    """Average one bucket. Hooks get no leaf listed in ``sparse``, as in eager steps, though it is dense here."""
    if is_sparse(own[0]):
        path = bucket.slots[0].path
        raise LeafError(
            f"the gradient {path} is sparse (BCOO), expected a dense array: in a compiled step ranks cannot have "
            "different numbers of rows. Use gradient.todense(), or average it from Python.",
            path=path,
        )
    summed = [all_.is_summed(gradient) for gradient in own]
    if any(summed):
        return _average_partly_summed(bucket, own, summed, hook, all_), state
    chosen, before = (hooks.average(), ()) if bucket.sparse or hook is None else (hook, state)
    shown = dataclasses.replace(bucket, flat=join_flat(own), divisor=all_.size)
    flat, after = hooks.reduce(chosen, shown, before, all_)
    return bucket.views(flat), state if bucket.sparse else after


def _average_partly_summed(
    bucket: Bucket, own: Sequence[Any], summed: Sequence[bool], hook: hooks.Hook | None, all_: Collectives
) -> list[Any]:
    """Average a bucket; only divide gradients that JAX has summed (those of replicated parameters)."""
    if hook is not None:
        slot = bucket.slots[summed.index(True)]
        raise HookError(
            f"the hook {hook.name!r} comes too late: JAX has summed the gradient of {slot.path} over the mesh already, "
            "because that parameter is typed as replicated. Use DataParallel.value_and_grad, "
            "jax.lax.pcast(params, axis, to='varying') before differentiating, or shard_map's check_vma=False.",
            bucket=bucket.index,
            hook=hook.name,
        )
    shares = [divided(gradient, all_.size) for gradient in own]
    return [x if flag else all_.allreduce(x) for x, flag in zip(shares, summed, strict=True)]


def localized(collectives: Collectives, args: Args, argnums: int | Sequence[int]) -> list[Any]:
    """Return the arguments; the differentiated arguments become this rank's own: see ``Mesh.localize``."""
    numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
    chosen = {number % max(1, len(args)) for number in numbers}
    return [jax.tree.map(collectives.localize, arg) if k in chosen else arg for k, arg in enumerate(args)]
