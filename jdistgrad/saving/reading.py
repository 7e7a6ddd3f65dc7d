"""Read the parts of a checkpoint, and find each caller's leaves, compared before they replace others."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jdistgrad.errors import CheckpointError
from jdistgrad.optim.values import first_difference
from jdistgrad.rpc.failures import in_short
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving import files, saved_leaves
from jdistgrad.saving.marks import PlacedLeaf, Slice
from jdistgrad.saving.saved_leaves import Description

SHARED = "shared"

Predecessors = Mapping[int, int | None]  # by caller: see predecessors()


def own_part(rank: int) -> str:
    return f"own@{rank}"


class Reader:
    """The parts of a complete checkpoint."""

    def __init__(self, folder: str):
        self.folder = pathlib.Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(
                f"restore: {current_worker().info} does not see {folder}, but another worker does. Restore from a disk "
                "that all workers see. Nothing was restored on any worker."
            )
        self.manifest = files.read_manifest(self.folder)
        self.parts: dict[str, Any] = self.manifest["parts"]

    def part(self, name: str) -> dict[str, Description]:
        """Return the descriptions of a part's leaves, each with its folder."""
        entry = self.parts.get(name, {"folder": "", "leaves": {}})
        return {place: {**one, "folder": entry["folder"]} for place, one in entry["leaves"].items()}

    def data(self, described: Mapping[Any, Description]) -> dict[Any, np.ndarray | None]:
        """Read the data of leaves, by place; each folder once."""
        found: dict[Any, np.ndarray | None] = dict.fromkeys(described)
        for folder in {one["folder"] for one in described.values() if "at" in one}:
            here = {place: one["at"] for place, one in described.items() if one["folder"] == folder and "at" in one}
            try:
                arrays = files.read(self.folder / folder, set(here.values()))
            except Exception as error:
                raise CheckpointError(
                    f"restore: {current_worker().info} could not read {self.folder / folder}: {in_short(error)}. "
                    "Nothing was restored on any worker."
                ) from error
            found |= {place: arrays[at] for place, at in here.items()}
        return found

    def fitting(self, saved: Mapping[str, Description], ours: Mapping[str, Any], what: str = "") -> dict[str, Any]:
        """Return the saved leaves for ours, by place. Raises CheckpointError if they do not fit."""
        expected = {place: saved_leaves.described(leaf, what + place) for place, leaf in ours.items()}
        differs = first_difference(saved, expected, saved_leaves.fits, saved_leaves.spelled)
        if differs is not None:
            raise CheckpointError(
                f"restore of {self.folder} on {current_worker().info}: {what}{differs}. Nothing was restored on any "
                "worker."
            )
        data = self.data(saved)
        return {place: saved_leaves.rebuilt(saved[place], data[place], leaf) for place, leaf in ours.items()}


def predecessors(callers: Sequence[int], size: int, manifest: Mapping[str, Any]) -> dict[int, int | None]:
    """Return, for each caller, the rank that saved what the caller restores; None for a new one.

    Callers correspond by their order. In a world of the same size in which callers were lost, before or since, they
    correspond by rank.
    """
    before: list[int] = manifest["workers"]
    if size == manifest["size"] and (set(callers) <= set(before) or set(before) <= set(callers)):
        return {rank: rank if rank in before else None for rank in callers}
    return {rank: before[number] if number < len(before) else None for number, rank in enumerate(callers)}


def held_leaves(reader: Reader, leaves: Sequence[PlacedLeaf], of_callers: Predecessors) -> dict[str, Any]:
    """Return the saved leaves of this caller's trees, by place."""
    rank, held = current_worker().rank, [leaf for leaf in leaves if not leaf.is_owned]
    was = of_callers[rank]
    found = reader.fitting(reader.part(SHARED), {leaf.place: leaf.value for leaf in held if not leaf.own})
    own = {leaf.place: leaf.value for leaf in held if leaf.own and not isinstance(leaf.value, Slice)}
    if was is not None:
        mine = {place: one for place, one in reader.part(own_part(was)).items() if "slice" not in one}
        found |= reader.fitting(mine, own)
    for leaf in held:
        if isinstance(leaf.value, Slice):
            found[leaf.place] = _slice(reader, leaf.place, leaf.value.among(list(of_callers), rank), of_callers)
    return found


def _slice(reader: Reader, place: str, ours: Slice, of_callers: Predecessors) -> Any:
    """Return this worker's slice of an array, cut from the slices that were saved."""
    by_rank = {one["slice"]["rank"]: one for one in _slices_of_group(reader, place, ours, of_callers)}
    expected = saved_leaves.described(ours.part, place)
    one = next(iter(by_rank.values()), None)
    saved = "missing" if one is None else f"{one['dtype']}{one['slice']['shape']}"
    wanted = f"{expected['dtype']}{list(ours.shape)}"
    if one is None or saved != wanted or len(by_rank) != one["slice"]["count"]:
        raise CheckpointError(
            f"restore of {reader.folder}: the slices of {place} are {saved}, in {len(by_rank)} parts; expected "
            f"{wanted}. Nothing was restored on any worker."
        )
    count, size = len(by_rank), ours.part.shape[0]
    ranks = [ours.rank] if count == ours.count else range(count)
    data, dtype = reader.data({rank: by_rank[rank] for rank in ranks}), saved_leaves.named_dtype(expected["dtype"])
    found = [saved_leaves.host(dtype, tuple(by_rank[rank]["shape"]), data[rank]) for rank in ranks]
    if count != ours.count:
        whole = np.concatenate(found)[: math.prod(ours.shape)][ours.rank * size :][:size]
        found = [np.concatenate([whole, np.zeros(size - len(whole), dtype)])]  # the last slices are padded
    return saved_leaves.rebuilt({**expected, "kind": one["kind"]}, found[0], ours.part)


def _slices_of_group(reader: Reader, place: str, ours: Slice, of_callers: Predecessors) -> list[Description]:
    """Return the slices of one group: the one in which the predecessor of our group's first worker was."""
    before: list[int] = reader.manifest["workers"]
    found = [one for rank in before if "slice" in (one := reader.part(own_part(rank)).get(place, {}))]
    group_of = [tuple(one["slice"].get("group") or before) for one in found]
    if len(set(group_of)) < 2:
        return found
    first = min(rank for rank in ours.group or of_callers if rank in of_callers)
    groups: dict[int | None, tuple[int, ...]] = {rank: group for group in group_of for rank in group}
    if of_callers[first] not in groups:
        raise CheckpointError(
            f"restore of {reader.folder}: {place} was divided in each of the groups {sorted(set(group_of))}, none "
            f"of which has a worker number {list(of_callers).index(first)}, the first of the group of "
            f"{current_worker().info}. Restore with no more groups than there were. Nothing was restored on any worker."
        )
    chosen = groups[of_callers[first]]
    return [one for one, group in zip(found, group_of, strict=True) if group == chosen]
