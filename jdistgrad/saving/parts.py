"""The parts of a checkpoint: which worker is asked for what.

Leaves that all callers have alike are the leader's part; leaves that each has for itself, a part of each. A reference's
value is a part, and what an owner keeps of an optimizer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jdistgrad.data_parallel.collectives import world
from jdistgrad.errors import CheckpointError, DisagreementError
from jdistgrad.optim.distributed import DistributedOptimizer
from jdistgrad.rpc.references.rref import RRef
from jdistgrad.saving.callers import Job
from jdistgrad.saving.marks import Slice
from jdistgrad.saving.owners import (
    SHARED,
    HeldWork,
    OptimizerWork,
    ValueWork,
    Work,
    own_part,
)
from jdistgrad.saving.places import Leaf

Asked = dict[int, list[Work]]  # by the rank of the worker that does it


class Plan(NamedTuple):
    """What a caller tells the others: the places of its leaves, and what is to be done for them, by owner."""

    places: list[str]
    asked: Asked


def plan_of(job: Job, *, hold: bool = False) -> Plan:
    """Return the plan of this caller; if asked, hold its leaves for those who will write them."""
    asked: Asked = {}
    leaves = job.leaves()
    if hold:
        _require_all_slices(job, leaves)
        _hold(job, leaves)
    for leaf in leaves:
        if _is_owned(leaf):
            for rank, work in works_for(leaf, job.rank):
                asked.setdefault(rank, []).append(work)
    held = [own_part(job.rank), *([SHARED] if job.leads else [])]
    asked.setdefault(job.rank, []).extend(HeldWork(part, job.held_as) for part in held)
    return Plan([leaf.place for leaf in leaves], asked)


def _require_all_slices(job: Job, leaves: Sequence[Leaf]) -> None:
    """Raise CheckpointError if a worker that has a slice of an array does not save: nobody could restore the array."""
    for leaf in leaves:
        group = (leaf.value.group or ()) if isinstance(leaf.value, Slice) else ()
        missing = sorted(set(group) - set(job.callers))
        if missing:
            raise CheckpointError(
                f"save: {leaf.place} is divided among the workers {list(group)}, but {missing} do not save, so that it "
                "could not be restored. Nothing was saved; what was saved before is still there."
            )


def _is_owned(leaf: Leaf) -> bool:
    """Return whether owners write a leaf, not the caller."""
    return isinstance(leaf.value, RRef | DistributedOptimizer)


def works_for(leaf: Leaf, rank: int) -> list[tuple[int, ValueWork | OptimizerWork]]:
    """Return the work that a reference or an optimizer asks of its owners. ``rank``: of the caller whose own it is.

    Raises StaleReferenceError for those of another world, where others may have their ids.
    """
    part = own_part(rank, leaf.place) if leaf.own else leaf.place
    if isinstance(leaf.value, RRef):
        leaf.value._home(leaf.place)
        return [(leaf.value.owner.rank, ValueWork(part, leaf.value.id, own=leaf.own))]
    leaf.value._require_its_world(leaf.place)
    owners = leaf.value._on_owners
    return [
        (owned.owner.rank, OptimizerWork(f"{part}/{k}", owned.id, tuple(numbers), own=leaf.own))
        for k, (owned, numbers) in enumerate(owners)
    ]


def of_all(plans: Mapping[int, Plan], leader: int) -> Asked:
    """Return all the work that a checkpoint is. Raises DisagreementError if callers have different trees."""
    found: Asked = {}
    for caller, plan in plans.items():
        _check_places(plans[leader].places, plan.places, leader, caller)
        for rank, works in plan.asked.items():
            mine = [work for work in works if work.own or caller == leader]
            found.setdefault(rank, []).extend(mine)
    return {rank: works for rank, works in found.items() if works}


def _check_places(expected: list[str], found: list[str], leader: int, caller: int) -> None:
    if expected != found:
        place = next(iter(set(expected) ^ set(found)), "the order")
        has = f"worker {leader if place in expected else caller} has {place}, the other has not"
        raise DisagreementError(f"workers {leader} and {caller} have different trees: {has}. Nothing was saved.")


def _hold(job: Job, leaves: Sequence[Leaf]) -> None:
    """Keep this caller's leaves for the calls that will ask for them."""
    held: dict[str, dict[str, Any]] = {own_part(job.rank): {}, SHARED: {}}
    for leaf in leaves:
        if not _is_owned(leaf):
            held[own_part(job.rank) if leaf.own else SHARED][leaf.place] = leaf.value
    world.keep(job.held_as, held)


def release(job: Job) -> None:
    world.forget(job.held_as)
