"""What workers do for a checkpoint when they are asked: write their parts, and prepare what will be put back.

A part is a dict of leaves by place. The manifest says in which folder each part is, and describes its leaves.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jdistgrad.errors import CheckpointError
from jdistgrad.optim.owner import OwnedParameters, Value
from jdistgrad.optim.restoring import first_difference
from jdistgrad.rpc import trees
from jdistgrad.rpc.failures import in_short
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving import descriptions, files
from jdistgrad.saving.descriptions import Description
from jdistgrad.saving.marks import Leaf, Slice, require_different
from jdistgrad.wire.interrupts import wait_for_first
from jdistgrad.wire.message import spell

Part = dict[str, Any]

SHARED = "shared"
UNDIVIDED = "state[of "  # begins the names of a state of which optax cannot tell what belongs to which value


def own_part(rank: int, place: str = "own") -> str:
    """Return the name of a part that a worker has for itself."""
    return f"{place}@{rank}"


@dataclasses.dataclass(frozen=True)
class Work:
    """A part that is a value of its owner's, or what one owner keeps of an optimizer.

    Arguments:
      identifier: of the value, or of the optimizer's part on this owner.
      numbers: those of the optimizer's values that are here; None for a value.
    """

    part: str
    identifier: int
    own: bool
    numbers: tuple[int, ...] | None = None

    def take(self) -> tuple[Part, dict[str, Any]]:
        """Return the part, and what else its entry in the manifest says."""
        value = value_here(self.identifier)
        if self.numbers is None:
            return _leaves_of_value(value), {}
        values, state = value.state()
        found, of_number = named_leaves(value, values, state, self.numbers)
        return found, {"numbers": list(self.numbers), "of_number": of_number}


def works_for(leaf: Leaf, rank: int) -> list[tuple[int, Work]]:
    """Return the work that a reference or an optimizer asks of its owners; nothing of other leaves.

    Raises StaleReferenceError for those of another world, where others may have their ids.

    Arguments:
      rank: of the caller whose own it is.
    """
    part = own_part(rank, leaf.place) if leaf.own else leaf.place
    if isinstance(leaf.value, RRef):
        leaf.value._home(leaf.place)
        return [(leaf.value.owner.rank, Work(part, leaf.value.id, leaf.own))]
    if not leaf.is_owned:
        return []
    leaf.value._require_its_world(leaf.place)
    return [
        (owned.owner.rank, Work(f"{part}/{k}", owned.id, leaf.own, tuple(numbers)))
        for k, (owned, numbers) in enumerate(leaf.value._on_owners)
    ]


def value_here(identifier: int) -> Any:
    """Return a value that this worker owns, between calls that change it. Raises what the making of it raised."""
    worker, owned = current_worker(), current_worker().references.owned
    with owned.lock(identifier):
        value = owned.value(identifier)
        wait_for_first((value,), worker.timeout)
        if not value.done():
            raise CheckpointError(f"{worker.info} has not made the value {spell(identifier)} in {worker.timeout:g} s")
        return value.result()


def _leaves_of_value(value: Any, place: str = "") -> Part:
    found = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda node: isinstance(node, RRef))[0]
    placed = [(place + jax.tree_util.keystr(path), leaf) for path, leaf in found]
    require_different(where for where, _ in placed)
    return dict(placed)


def named_leaves(
    owned: OwnedParameters, values: Sequence[Any], state: Any, numbers: Sequence[int]
) -> tuple[Part, dict[str, int]]:
    """Return the leaves of an optimizer on its owner by name; and of those that belong to one value, its number."""
    found: Part = {}
    numbered: dict[str, int] = {}
    for number, value in zip(numbers, values, strict=True):
        mine = _leaves_of_value(value, f"values[{number}]")
        found.update(mine)
        numbered.update(dict.fromkeys(mine, number))
    apart = [Value.of(value) for value in values]
    optimized = [jax.tree.unflatten(one.tree, one.leaves) for one in apart]
    names = names_in(owned.transformation, state, optimized, numbers)
    for (name, of_value), leaf in zip(names, jax.tree.leaves(state), strict=True):
        found[name] = leaf
        if of_value is not None:
            numbered[name] = of_value
    return found, numbered


# An owner's state is that of the list of its values, so a leaf's path in it depends on which values the owner has. In a
# checkpoint the leaf of a value is named by the value's number in the whole optimizer, to be found on any owner.


@dataclasses.dataclass(frozen=True)
class _Label:
    """Stands in a state in place of a leaf. ``number``: of its value; None: of all."""

    number: int | None
    path: tuple[Any, ...] = ()


def names_in(
    tx: optax.GradientTransformation, state: Any, values: Sequence[Any], numbers: Sequence[int]
) -> list[tuple[str, int | None]]:
    """Return of each leaf of an owner's state, in JAX's order, its name, and the number of the value it belongs to.

    The number is None for what belongs to all of the owner's values.

    Arguments:
      values: the trees of the owner's values, without what is not optimized.
      numbers: their numbers in the optimizer.
    """

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    labels = [
        jax.tree_util.tree_map_with_path(lambda path, _, number=number: _Label(number, path), value)
        for number, value in zip(numbers, values, strict=True)
    ]
    try:
        marked = optax.tree_map_params(
            tx,
            lambda leaf, label: leaf if is_masked(leaf) else label,
            state,
            labels,
            transform_non_params=lambda _: _Label(None),
            is_leaf=is_masked,
        )
        found = jax.tree_util.tree_flatten_with_path(marked)[0]
    except Exception:  # optax cannot tell where the parameters are in every user's state
        found = []
    if len(found) != len(jax.tree.leaves(state)):
        begin = f"{UNDIVIDED}{', '.join(map(str, numbers))}]"  # fits only an owner of the same values
        paths = jax.tree_util.tree_flatten_with_path(state)[0]
        return [(f"{begin}{jax.tree_util.keystr(path)}", None) for path, _ in paths]
    names = list[tuple[str, int | None]]()
    for path, label in found:
        spelled = jax.tree_util.keystr(path)
        number = label.number if isinstance(label, _Label) else None
        if number is not None:
            before = path[: len(path) - len(label.path) - 1]  # then comes the value's place among the owner's
            spelled = f"{jax.tree_util.keystr(before)}[{number}]{jax.tree_util.keystr(label.path)}"
        names.append((f"state{spelled}", number))
    return names


# Writing.


def write_works(folder: str, works: Sequence[Work], attempt: str | None, callers: Sequence[int]) -> dict[str, Any]:
    """Write parts into a folder of this worker's; return the parts' entries in the manifest.

    Arguments:
      attempt: of this worker, if it is one of the callers: then it writes the parts that it holds too.
    """
    arrays: files.Arrays = {}
    entries: dict[str, Any] = {}
    parts = [(work.part, work.part, *work.take()) for work in works]
    if attempt is not None:
        parts += [(name, "", part, {}) for name, part in _held(attempt, callers).items()]
    for name, inside, part, more in parts:
        described = {place: _described(leaf, f"save: {inside}{place}", arrays) for place, leaf in part.items()}
        entries[name] = {"folder": pathlib.Path(folder).name, "leaves": described, **more}
    files.write(pathlib.Path(folder), arrays)
    return entries


def _held(attempt: str, callers: Sequence[int]) -> dict[str, Part]:
    """Return the parts that a caller holds: leaves of its trees, its own and, from the first caller, all callers'."""
    me = current_worker()
    if attempt not in me.kept:
        raise CheckpointError(f"save: {me.info} has left it before it wrote its part. Save again.")
    own: Part = {}
    shared: Part = {}
    for leaf in me.kept[attempt]:
        if isinstance(leaf.value, Slice):
            missing = sorted(set(leaf.value.group or ()) - set(callers))
            if missing:
                raise CheckpointError(
                    f"save: {leaf.place} is divided among the workers {list(leaf.value.group or ())}, but {missing} do "
                    "not save, so that it could not be restored. Nothing was saved; what was saved before is still "
                    "there."
                )
            own[leaf.place] = leaf.value.among(callers, me.rank)
        elif not leaf.is_owned:
            (own if leaf.own else shared)[leaf.place] = leaf.value
    return {own_part(me.rank): own, **({SHARED: shared} if me.rank == callers[0] else {})}


def _described(leaf: Any, where: str, arrays: files.Arrays) -> Description:
    of_slice = {}
    if isinstance(leaf, Slice):
        group = leaf.group and [int(rank) for rank in leaf.group]
        of_slice = {"slice": {"shape": list(leaf.shape), "rank": leaf.rank, "count": leaf.count, "group": group}}
        leaf = leaf.part
    description = descriptions.described(leaf, where)
    if description["kind"] == "function":
        descriptions.check_function(leaf, where)
    stored = descriptions.data(leaf) if "shape" in description else None
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
                "a disk that all workers see. Nothing was restored on any worker."
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

    def fitting(self, saved: Mapping[str, Description], ours: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Return the saved leaves for ours, by place. Raises CheckpointError if they do not fit."""
        expected = {place: descriptions.described(leaf, what + place) for place, leaf in ours.items()}
        differs = first_difference(saved, expected, descriptions.fits, descriptions.spelled)
        if differs is not None:
            raise CheckpointError(
                f"restore of {self.folder} on {current_worker().info}: {what}{differs}. Nothing was restored on any "
                "worker."
            )
        data = self.data(saved)
        return {place: descriptions.rebuilt(saved[place], data[place], leaf) for place, leaf in ours.items()}


def prepare(folder: str, work: Work) -> Callable[[], None]:
    """Read a part, and compare it with what it will replace. Return what puts it back; changes nothing before."""
    reader, owned = Reader(folder), current_worker().references.owned
    known = value_here(work.identifier)
    if work.numbers is not None:
        return _prepared_optimizer(reader, work.part, known, work.numbers)
    found = reader.fitting(reader.part(work.part), _leaves_of_value(known), work.part)
    value = _filled(known, iter(found.values()))

    def put_back() -> None:
        with owned.lock(work.identifier):
            owned.replace(work.identifier, value)

    return put_back


def _prepared_optimizer(reader: Reader, part: str, owned: OwnedParameters, numbers: tuple[int, ...]) -> Any:
    """Prepare the values and the state of an optimizer on this owner, whoever had them before."""
    values, state = owned.state()
    known, _ = named_leaves(owned, values, state, numbers)
    saved: dict[str, Description] = {}
    whole, then = part.rpartition("/")[0], list[list[int]]()
    for name, entry in reader.parts.items():
        if name.startswith(f"{whole}/"):
            then.append(entry["numbers"])
            numbered, there = entry["of_number"], reader.part(name)
            saved |= {place: one for place, one in there.items() if numbered.get(place) in numbers}
            if numbers[0] in entry["numbers"]:  # what belonged to all of an owner's values
                saved |= {place: one for place, one in there.items() if place not in numbered}
    is_undivided = any(name.startswith(UNDIVIDED) for name in known)
    if is_undivided and then and list(numbers) not in then:
        owners = [f"({', '.join(map(str, each))})" for each in (*then, numbers)]
        raise CheckpointError(
            f"restore of {reader.folder} on {current_worker().info}: {whole}: optax cannot tell which parts of this "
            "transformation's state belong to which value, so the state fits only owners of the same values as when it "
            f"was saved: {', '.join(owners[:-1])}. This one has {owners[-1]} (numbers in the optimizer's list). "
            "Nothing was restored on any worker."
        )
    found = reader.fitting(saved, known, part)
    ordered = iter(found.values())
    restored = {number: _filled(value, ordered) for number, value in enumerate(values)}
    states = jax.tree.unflatten(jax.tree.structure(state), list(ordered))
    return functools.partial(owned.put_back, {"values": restored, "states": {0: states}})


def _filled(value: Any, found: Iterator[Any]) -> Any:
    return trees.map_leaves(lambda leaf: None if leaf is None else next(found), value)
