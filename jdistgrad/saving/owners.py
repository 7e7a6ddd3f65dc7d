"""What workers do for a checkpoint when they are asked: write their parts, and prepare what will be put back.

A part is a dict of leaves by place. The manifest says in which folder each part is, and describes its leaves.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.data_parallel.collectives import world
from jdistgrad.errors import CheckpointError
from jdistgrad.optim.owner import OwnedParameters, Value
from jdistgrad.rpc.references.rref import RRef
from jdistgrad.rpc.serving.failures import in_short
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving import files, folders, leaves
from jdistgrad.saving.leaves import Description
from jdistgrad.saving.marks import Slice
from jdistgrad.saving.places import mapped, require_different
from jdistgrad.saving.states import UNDIVIDED, Name, names_in
from jdistgrad.wire.ids import spell
from jdistgrad.wire.interrupts import wait_for_first

Part = dict[str, Any]


SHARED = "shared"


def own_part(rank: int, place: str = "own") -> str:
    """Return the name of a part that a worker has for itself."""
    return f"{place}@{rank}"


@dataclasses.dataclass(frozen=True)
class ValueWork:
    """A part that is the value of a reference."""

    part: str
    identifier: int
    own: bool

    def take(self) -> tuple[Part, dict[str, Any]]:
        return dict(_leaves_of_value(value_here(self.identifier))), {}


@dataclasses.dataclass(frozen=True)
class OptimizerWork:
    """A part that is what one owner keeps of an optimizer: the values with these numbers, and their state."""

    part: str
    identifier: int
    numbers: tuple[int, ...]
    own: bool

    def take(self) -> tuple[Part, dict[str, Any]]:
        owned: OwnedParameters = value_here(self.identifier)
        found, of_number = named_leaves(owned, *owned.state(), self.numbers)
        return found, {"numbers": list(self.numbers), "of_number": of_number}


@dataclasses.dataclass(frozen=True)
class HeldWork:
    """A part that a caller holds: leaves of its own trees."""

    part: str
    held_as: str
    own: bool = True
    identifier: None = None  # of no reference

    def take(self) -> tuple[Part, dict[str, Any]]:
        held = world.kept(self.held_as)
        if held is None:
            raise CheckpointError(f"save: {current_worker().info} has left it before it wrote its part. Save again.")
        return held[self.part], {}


Work = ValueWork | OptimizerWork | HeldWork


def value_here(identifier: int) -> Any:
    """Return a value that this worker owns, between calls that change it. Raises what the making of it raised."""
    worker, owned = current_worker(), current_worker().references.owned
    with owned.lock(identifier):
        value = owned.value(identifier)
        wait_for_first((value,), worker.timeout)
        if not value.done():
            raise CheckpointError(f"{worker.info} has not made the value {spell(identifier)} in {worker.timeout:g} s")
        return value.result()


def _leaves_of_value(value: Any, place: str = "") -> list[tuple[str, Any]]:
    found = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda node: isinstance(node, RRef))[0]
    placed = [(place + jax.tree_util.keystr(path), leaf) for path, leaf in found]
    require_different(where for where, _ in placed)
    return placed


def named_leaves(
    owned: OwnedParameters, values: Sequence[Any], state: Any, numbers: Sequence[int]
) -> tuple[Part, dict[str, int]]:
    """Return the leaves of an optimizer on its owner by name; and of those that belong to one value, its number."""
    found: Part = {}
    numbered: dict[str, int] = {}
    for number, value in zip(numbers, values, strict=True):
        mine = _leaves_of_value(value, f"values[{number}]")
        found.update(mine)
        numbered.update(dict.fromkeys(dict(mine), number))
    for name, leaf in zip(_names(owned, values, state, numbers), jax.tree.leaves(state), strict=True):
        found[name.text] = leaf
        if name.number is not None:
            numbered[name.text] = name.number
    return found, numbered


def _names(owned: OwnedParameters, values: Sequence[Any], state: Any, numbers: Sequence[int]) -> list[Name]:
    apart = [Value.of(value) for value in values]
    return names_in(owned.transformation, state, [jax.tree.unflatten(one.tree, one.leaves) for one in apart], numbers)


# Writing.


def write_works(folder: str, works: Sequence[Work]) -> dict[str, Any]:
    """Write parts into a folder of this worker's; return the parts' entries in the manifest."""
    arrays: files.Arrays = {}
    entries = {work.part: _entry(pathlib.Path(folder).name, work, arrays) for work in works}
    files.write(pathlib.Path(folder), arrays)
    return entries


def _entry(folder: str, work: Work, arrays: files.Arrays) -> dict[str, Any]:
    """Return a part's entry; add its arrays to those to be written."""
    part, more = work.take()
    inside = work.part if isinstance(work, ValueWork | OptimizerWork) else ""
    described = {place: _described(leaf, f"save: {inside}{place}", arrays) for place, leaf in part.items()}
    return {"folder": folder, "leaves": described, **more}


def _described(leaf: Any, where: str, arrays: files.Arrays) -> Description:
    of_slice = {}
    if isinstance(leaf, Slice):
        group = leaf.group and [int(rank) for rank in leaf.group]
        of_slice = {"slice": {"shape": list(leaf.shape), "rank": leaf.rank, "count": leaf.count, "group": group}}
        leaf = leaf.part
    description = leaves.described(leaf, where)
    if description["kind"] == "function":
        leaves.check_function(leaf, where)
    stored = leaves.data(leaf) if "shape" in description else None
    if stored is None:
        return {**description, **of_slice}
    at = str(len(arrays))
    arrays[at] = stored
    return {**description, **of_slice, "at": at}


# Reading.


class Reader:
    """The parts of a complete checkpoint."""

    def __init__(self, folder: str):
        self.folder = pathlib.Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(
                f"restore: {current_worker().info} does not see {folder}, which another worker has found. Restore from "
                "a disk that all workers see; or again, if a save that keeps only later ones has removed it meanwhile. "
                "Nothing was restored on any worker."
            )
        self.manifest = folders.read_manifest(self.folder)
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
            arrays = self._arrays(self.folder / folder, set(here.values()))
            found |= {place: arrays[at] for place, at in here.items()}
        return found

    def _arrays(self, folder: pathlib.Path, names: set[str]) -> files.Arrays:
        try:
            return files.read(folder, names)
        except Exception as error:
            raise CheckpointError(
                f"restore: {current_worker().info} could not read {folder}: {in_short(error)}. Nothing was restored on "
                "any worker."
            ) from error

    def fitting(self, saved: Mapping[str, Description], ours: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Return the saved leaves for ours, by place. Raises CheckpointError if they do not fit."""
        expected = {place: leaves.described(leaf, what + place) for place, leaf in ours.items()}
        differs = leaves.difference(saved, expected)
        if differs is not None:
            raise CheckpointError(
                f"restore of {self.folder} on {current_worker().info}: {what}{differs}. Nothing was restored on any "
                "worker."
            )
        data = self.data(saved)
        return {place: leaves.rebuilt(saved[place], data[place], leaf) for place, leaf in ours.items()}


def prepare(folder: str, work: ValueWork | OptimizerWork) -> "Prepared":
    """Read a part, and compare it with what it will replace. Changes nothing."""
    return _prepared_value(folder, work) if isinstance(work, ValueWork) else _prepared_optimizer(folder, work)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What will be put back when all workers have found that theirs fits."""

    put_back: Callable[[], None]


def _prepared_value(folder: str, work: ValueWork) -> Prepared:
    reader, owned = Reader(folder), current_worker().references.owned
    known = value_here(work.identifier)
    found = reader.fitting(reader.part(work.part), dict(_leaves_of_value(known)), work.part)
    value = _filled(known, iter(found.values()))

    def put_back() -> None:
        with owned.lock(work.identifier):
            owned.replace(work.identifier, value)

    return Prepared(put_back)


def _prepared_optimizer(folder: str, work: OptimizerWork) -> Prepared:
    """Prepare the values and the state of an optimizer on this owner, whoever had them before."""
    reader, owned = Reader(folder), value_here(work.identifier)
    values, state = owned.state()
    known, _ = named_leaves(owned, values, state, work.numbers)
    if any(name.startswith(UNDIVIDED) for name in known):
        _require_same_values(reader, work)
    found = reader.fitting(_saved_of(reader, work), known, work.part)
    ordered = iter(found.values())
    restored = {number: _filled(value, ordered) for number, value in enumerate(values)}
    states = jax.tree.unflatten(jax.tree.structure(state), list(ordered))
    return Prepared(lambda: owned.put_back({"values": restored, "states": {0: states}}))


def _filled(value: Any, found: Iterator[Any]) -> Any:
    return mapped(lambda leaf: None if leaf is None else next(found), value)


def _require_same_values(reader: Reader, work: OptimizerWork) -> None:
    """Raise CheckpointError if an owner's state was saved, but no owner then had the values that this one has."""
    whole = work.part.rpartition("/")[0]
    then = [entry["numbers"] for name, entry in reader.parts.items() if name.startswith(f"{whole}/")]
    if then and list(work.numbers) not in then:
        raise CheckpointError(
            f"restore of {reader.folder} on {current_worker().info}: {whole}: optax cannot tell which parts of this "
            "transformation's state belong to which value, so the state fits only owners of the same values as when it "
            f"was saved: {_spelled(then)}. This one has {_spelled([work.numbers])} (numbers in the optimizer's list). "
            "Nothing was restored on any worker."
        )


def _spelled(owners: Iterable[Sequence[int]]) -> str:
    return ", ".join(f"({', '.join(map(str, numbers))})" for numbers in owners)


def _saved_of(reader: Reader, work: OptimizerWork) -> dict[str, Description]:
    """Return the leaves saved of the values with a job's numbers, and those that belonged to all of an owner's."""
    found: dict[str, Description] = {}
    whole = work.part.rpartition("/")[0]
    for name, entry in reader.parts.items():
        if name.startswith(f"{whole}/"):
            numbered, part = entry["of_number"], reader.part(name)
            found |= {place: one for place, one in part.items() if numbered.get(place) in work.numbers}
            if work.numbers[0] in entry["numbers"]:
                found |= {place: one for place, one in part.items() if place not in numbered}
    return found


def put_back(prepared: Prepared) -> None:
    prepared.put_back()
