"""What the workers of a job do for a checkpoint: write their parts, or read others and put them back.

A part is a dict of leaves by place. The manifest says in which folder each part is, and describes its leaves.
"""

import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jdistgrad.errors import CheckpointError
from jdistgrad.optim.distributed import DistributedOptimizer
from jdistgrad.optim.owner import OwnedParameters, Saved
from jdistgrad.rpc import trees
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving import files, saved_leaves
from jdistgrad.saving.marks import PlacedLeaf, Slice, require_different
from jdistgrad.saving.reading import SHARED, Reader, own_part
from jdistgrad.saving.saved_leaves import Description
from jdistgrad.wire.interrupts import wait_for_first
from jdistgrad.wire.message import spell

Part = dict[str, Any]

STATE = "state"  # how the names of leaves of optimizers' states begin


class Work(NamedTuple):
    """What one owner keeps for a caller's leaf: the value of a reference, or a share of an optimizer.

    Attributes:
      place: the leaf's.
      own: whether each caller has its own.
      identifier: of the value or the share.
      share: the number of the share; None for a value.
    """

    owner: int
    place: str
    own: bool
    identifier: int
    share: int | None = None

    def part(self, rank: int | None) -> str:
        """Return the name of the part. ``rank``: of the caller whose own it is."""
        name = f"{self.place}@{rank}" if self.own else self.place
        return name if self.share is None else f"{name}/{self.share}"


Asked = list[tuple[str, Work]]  # of one owner: parts, and what they are


def works_of(leaf: PlacedLeaf) -> Iterator[Work]:
    """Yield the owners' work for a leaf. Raises StaleReferenceError for one of another world, whose ids may recur."""
    if isinstance(leaf.value, RRef):
        leaf.value.home(leaf.place)
        yield Work(leaf.value.owner.rank, leaf.place, leaf.own, leaf.value.id)
    elif isinstance(leaf.value, DistributedOptimizer):
        for share, owned in enumerate(leaf.value.shares(leaf.place)):
            yield Work(owned.owner.rank, leaf.place, leaf.own, owned.id, share)


def by_owner(parts: Iterable[tuple[str, Work]]) -> dict[int, Asked]:
    """Return each owner's parts, without duplicates."""
    found: dict[int, Asked] = {}
    for part, work in dict.fromkeys(parts):
        found.setdefault(work.owner, []).append((part, work))
    return found


def _value_here(identifier: int) -> Any:
    """Return a value that this worker owns, under its lock. Raises the error of its creation."""
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


def _leaves_of_share(saved: Saved) -> Part:
    """Return the leaves of what is of an optimizer on an owner, by names that do not depend on the owner."""
    found: Part = {f"{STATE}{name}": leaf for name, leaf in saved["state"].items()}
    for number, value in saved["values"].items():
        found.update(_leaves_of_value(value, f"values[{number}]"))
    return found


def write(folder: str, asked: Asked, held: Mapping[str, Part]) -> dict[str, Any]:
    """Write parts into a new folder; return the parts' entries in the manifest.

    Arguments:
      asked: the parts that this worker owns.
      held: those that it holds as a caller.
    """
    arrays: files.Arrays = {}
    entries: dict[str, Any] = {}
    owned = [(name, name, _taken(work)) for name, work in asked]
    for name, inside, part in [*owned, *((name, "", part) for name, part in held.items())]:
        described = {place: _described(leaf, f"save: {inside}{place}", arrays) for place, leaf in part.items()}
        entries[name] = {"folder": pathlib.Path(folder).name, "leaves": described}
    files.write(folder, arrays)
    return entries


def _taken(work: Work) -> Part:
    """Return a part that this worker owns."""
    value = _value_here(work.identifier)
    return _leaves_of_value(value) if work.share is None else _leaves_of_share(value.state())


def held_parts(leaves: Iterable[PlacedLeaf], callers: Sequence[int]) -> dict[str, Part]:
    """Return the parts that a caller holds: leaves of its trees, its own and, from the first caller, all callers'."""
    rank = current_worker().rank
    own: Part = {}
    shared: Part = {}
    for leaf in leaves:
        if isinstance(leaf.value, Slice):
            missing = sorted(set(leaf.value.group or ()) - set(callers))
            if missing:
                raise CheckpointError(
                    f"save: {leaf.place} is divided among the workers {list(leaf.value.group or ())}, but {missing} do "
                    "not save, so that it could not be restored. Nothing was saved; what was saved before is still "
                    "there."
                )
            own[leaf.place] = leaf.value.among(callers, rank)
        elif not leaf.is_owned:
            (own if leaf.own else shared)[leaf.place] = leaf.value
    return {own_part(rank): own, **({SHARED: shared} if rank == callers[0] else {})}


def _described(leaf: Any, where: str, arrays: files.Arrays) -> Description:
    more: Description = {}
    if isinstance(leaf, Slice):
        group = leaf.group and [int(rank) for rank in leaf.group]
        more["slice"] = {"shape": list(leaf.shape), "rank": leaf.rank, "count": leaf.count, "group": group}
        leaf = leaf.part
    description = saved_leaves.described(leaf, where)
    if description["kind"] == "function":
        saved_leaves.check_function(leaf, where)
    stored = saved_leaves.data(leaf) if "shape" in description else None
    if stored is not None:
        more["at"] = str(len(arrays))
        arrays[more["at"]] = stored
    return description | more


def prepare(folder: str, asked: Asked) -> Callable[[], Any]:
    """Read parts and compare them with the values to replace. Return a function that replaces them."""
    reader = Reader(folder)
    ready = [(_prepared_value if work.share is None else _prepared_share)(reader, part, work) for part, work in asked]
    return lambda: [put_back() for put_back in ready]


def _prepared_value(reader: Reader, part: str, work: Work) -> Callable[[], None]:
    owned, known = current_worker().references.owned, _value_here(work.identifier)
    found = reader.fitting(reader.part(part), _leaves_of_value(known), part)
    value = _filled(known, iter(found.values()))

    def put_back() -> None:
        with owned.lock(work.identifier):
            owned.replace(work.identifier, value)

    return put_back


def _prepared_share(reader: Reader, part: str, work: Work) -> Callable[[], None]:
    """Prepare the values and the state of an optimizer on this owner, from all owners' parts."""
    owned: OwnedParameters = _value_here(work.identifier)
    known = owned.state()
    named, whole = _leaves_of_share(known), part.rpartition("/")[0]
    others = {f"{STATE}{name}" for name in owned.names} - set(named)
    mine = tuple(f"values[{number}]" for number in known["values"])
    saved = {
        place: leaf
        for name in reader.parts
        if name.startswith(f"{whole}/")
        for place, leaf in reader.part(name).items()
        if (place.startswith(STATE) and place not in others) or place.startswith(mine)
    }
    found = reader.fitting(saved, named, part)
    state = {name: found[f"{STATE}{name}"] for name in known["state"]}
    rest = iter(list(found.values())[len(state) :])
    values = {number: _filled(value, rest) for number, value in known["values"].items()}
    return functools.partial(owned.put_back, {"values": values, "state": state})


def _filled(value: Any, found: Iterator[Any]) -> Any:
    return trees.map_leaves(lambda leaf: None if leaf is None else next(found), value)
