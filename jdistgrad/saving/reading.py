"""The reading of a checkpoint by each caller: all of it is compared before any is put back."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jdistgrad.errors import CheckpointError
from jdistgrad.rpc import api
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving import descriptions, owners
from jdistgrad.saving.callers import Job, call_each, raise_failed
from jdistgrad.saving.marks import Slice, overlapping, regrouped
from jdistgrad.saving.owners import SHARED, Reader, own_part, works_for

Prepared = list[RRef[Any]]


def read(job: Job, folder: str) -> tuple[int, Prepared, list[Any]]:
    """Return the checkpoint's step, what owners have prepared, and the leaves of this caller's trees."""
    reader = Reader(folder)
    ours, whole = {leaf.place for leaf in job.leaves}, job.optimizers is not None
    for place in reader.manifest["places"]:  # optimizers may be left out altogether
        if place not in ours and (whole or place.startswith("trees")):
            raise CheckpointError(
                f"restore of {reader.folder}: {place} was saved, but is not asked for. Give trees of the same "
                "structure."
            )
    size, before = current_worker().size, reader.manifest
    of_callers = predecessors(list(job.plans), size, before["workers"], before.get("size"))
    was = of_callers[job.rank]
    found = _local(reader, job, of_callers)
    of_leader = [] if job.leads else [work for works in job.plans[job.leader].asked.values() for work in works]
    done = {work.identifier for work in of_leader}
    prepared: Prepared = []
    for leaf in job.leaves:
        if leaf.is_owned and not (leaf.own and was is None):
            prepared += [
                api.remote(rank, owners.prepare, (folder, work), timeout=float("inf"))
                for rank, work in works_for(leaf, job.rank if was is None else was)
                if leaf.own or work.identifier not in done
            ]
    for one, failure in [(one, one.creation().exception()) for one in prepared]:
        if failure is not None:
            what = f"restore of {folder}: {one.owner} could not prepare its part"
            raise_failed(one.owner, failure, what, "Nothing was restored on any worker.")
    step = int(reader.manifest["step"])
    return step, prepared, [found.get(leaf.place, leaf.given) for leaf in job.of_trees]


def predecessors(
    callers: Sequence[int], size: int, before: Sequence[int], size_before: int | None
) -> dict[int, int | None]:
    """Return the rank of the worker whose own each caller gets; None for a new one.

    It is the worker of its number, except where the callers are the same but for some that are lost, now or then.

    Arguments:
      size: of the world.
      before: the ranks of those that saved; ``size_before``: the size of their world.
    """
    if size == size_before and (set(callers) <= set(before) or set(before) <= set(callers)):
        return {rank: rank if rank in before else None for rank in callers}
    return {rank: before[number] if number < len(before) else None for number, rank in enumerate(callers)}


def put_back(prepared: Prepared) -> None:
    _, failed = call_each(operator.call, [(one.owner.rank, (one,)) for one in prepared])
    if failed is not None:
        then = "Others may have put back theirs: restore again before you go on."
        raise_failed(*failed, f"restore: {failed[0]} could not put back its part", then)


def _local(reader: Reader, job: Job, of_callers: Mapping[int, int | None]) -> dict[str, Any]:
    """Return the leaves that are the callers', by place."""
    local, was = [leaf for leaf in job.leaves if not leaf.is_owned], of_callers[job.rank]
    shared = {leaf.place: leaf.value for leaf in local if not leaf.own}
    found = reader.fitting(reader.part(SHARED), shared, "")
    own = {leaf.place: leaf.value for leaf in local if leaf.own and not isinstance(leaf.value, Slice)}
    if was is not None:
        mine = {place: one for place, one in reader.part(own_part(was)).items() if "slice" not in one}
        found |= reader.fitting(mine, own, "")
    for leaf in local:
        if isinstance(leaf.value, Slice):
            found[leaf.place] = _slice(reader, leaf.place, leaf.value.among(list(job.plans), job.rank), of_callers)
    return found


def _slice(reader: Reader, place: str, ours: Slice, of_callers: Mapping[int, int | None]) -> Any:
    """Return this worker's slice of an array, cut anew from the slices that were saved."""
    saved = _slices_of_group(reader, place, ours, of_callers)
    by_rank = {one["slice"]["rank"]: one for one in saved}
    expected = descriptions.described(ours.part, place)
    one = next(iter(by_rank.values()), None)
    found = "missing" if one is None else f"{one['dtype']}{one['slice']['shape']}"
    wanted = f"{expected['dtype']}{list(ours.shape)}"
    if one is None or found != wanted or len(by_rank) != one["slice"]["count"]:
        raise CheckpointError(
            f"restore of {reader.folder}: the slices of {place} are {found}, in {len(by_rank)} parts; expected "
            f"{wanted}. Nothing was restored on any worker."
        )
    needed = overlapping(ours.shape, ours.rank, ours.count, len(by_rank))
    data = reader.data({rank: by_rank[rank] for rank in needed})
    dtype = descriptions.named_dtype(expected["dtype"])
    parts = {rank: descriptions.host(dtype, tuple(by_rank[rank]["shape"]), part) for rank, part in data.items()}
    made = regrouped(parts, ours, len(by_rank), dtype)
    return descriptions.rebuilt({**expected, "kind": saved[0]["kind"]}, made, ours.part)


def _slices_of_group(
    reader: Reader, place: str, ours: Slice, of_callers: Mapping[int, int | None]
) -> list[descriptions.Description]:
    """Return the slices that one group saved: that of the predecessor of the first of our group."""
    before: list[int] = reader.manifest["workers"]
    found = [one for rank in before if "slice" in (one := reader.part(own_part(rank)).get(place, {}))]
    group_of = [tuple(one["slice"].get("group") or before) for one in found]
    first = min(rank for rank in ours.group or of_callers if rank in of_callers)
    groups: dict[int | None, tuple[int, ...]] = {rank: group for group in group_of for rank in group}
    if len(set(group_of)) > 1 and of_callers[first] not in groups:
        raise CheckpointError(
            f"restore of {reader.folder}: {place} was divided in each of the groups {sorted(set(group_of))}, none "
            f"of which has a worker number {list(of_callers).index(first)}, the first of the group of "
            f"{current_worker().info}. Restore with no more groups than there were. Nothing was restored on any worker."
        )
    chosen = groups[of_callers[first]] if len(set(group_of)) > 1 else None
    return [one for one, group in zip(found, group_of, strict=True) if chosen in (None, group)]
