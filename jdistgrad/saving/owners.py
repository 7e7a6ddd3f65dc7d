"""What the workers of a job do for a checkpoint: write their parts, or read others and put them back.

A part is a dict of leaves by place. The manifest says in which folder each part is, and describes its leaves.
"""

import functools
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from jdistgrad.errors import CheckpointError
from jdistgrad.optim.distributed import DistributedOptimizer
from jdistgrad.optim.owner import OwnedParameters, Value
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

Label = types.SimpleNamespace  # of a leaf of a state: the number of its value, and its path in it
UNDIVIDED = "state[of "  # prefix of the leaves of a state that optax cannot divide by value


class Work(NamedTuple):
    """What one owner keeps for a caller's leaf: the value of a reference, or a share of an optimizer.

    Attributes:
      place: the leaf's.
      own: whether each caller has its own.
      identifier: of the value or the share.
      share: the number of the share; None for a value.
      numbers: the numbers of the optimizer's values in the share.
    """

    owner: int
    place: str
    own: bool
    identifier: int
    share: int | None = None
    numbers: tuple[int, ...] = ()

    def part(self, rank: int | None) -> str:
        """Return the name of the part. ``rank``: of the caller whose own it is."""
        name = f"{self.place}@{rank}" if self.own else self.place
        return name if self.share is None else f"{name}/{self.share}"


Asked = list[tuple[str, Work]]  # of one owner: parts, and what they are


def works_of(leaf: PlacedLeaf) -> Iterator[Work]:
    """Yield the owners' work for a leaf. Raises StaleReferenceError for one of another world, whose ids may recur."""
    if isinstance(leaf.value, RRef):
        leaf.value._home(leaf.place)
        yield Work(leaf.value.owner.rank, leaf.place, leaf.own, leaf.value.id)
    elif isinstance(leaf.value, DistributedOptimizer):
        leaf.value._require_its_world(leaf.place)
        for share, (owned, numbers) in enumerate(leaf.value._on_owners):
            yield Work(owned.owner.rank, leaf.place, leaf.own, owned.id, share, tuple(numbers))


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


def _named_leaves(
    owned: OwnedParameters, values: Sequence[Any], state: Any, numbers: Sequence[int]
) -> tuple[Part, dict[str, int]]:
    """Return the leaves of an optimizer on its owner by name; and the value's number of those that belong to one."""
    found: Part = {}
    numbered: dict[str, int] = {}
    for number, value in zip(numbers, values, strict=True):
        mine = _leaves_of_value(value, f"values[{number}]")
        found.update(mine)
        numbered.update(dict.fromkeys(mine, number))
    apart = [Value.of(value) for value in values]
    optimized = [jax.tree.unflatten(one.tree, one.leaves) for one in apart]
    names = _names_in(owned.transformation, state, optimized, numbers)
    for (name, of_value), leaf in zip(names, jax.tree.leaves(state), strict=True):
        found[name] = leaf
        if of_value is not None:
            numbered[name] = of_value
    return found, numbered


# An owner's state is that of the list of its values, so a leaf's path in it depends on which values the owner has. In a
# checkpoint the leaf of a value is named by the value's number in the whole optimizer, to be found on any owner.


def _names_in(
    tx: optax.GradientTransformation, state: Any, values: Sequence[Any], numbers: Sequence[int]
) -> list[tuple[str, int | None]]:
    """Return the name of each leaf of an owner's state, and the number of its value; None if it belongs to all.

    Arguments:
      values: the trees of the owner's optimized values.
      numbers: their numbers in the optimizer.
    """
    labels = [
        jax.tree_util.tree_map_with_path(lambda path, _, number=number: Label(number=number, path=path), value)
        for number, value in zip(numbers, values, strict=True)
    ]
    try:
        marked = optax.tree_map_params(
            tx,
            lambda leaf, label: leaf if isinstance(leaf, optax.MaskedNode) else label,
            state,
            labels,
            transform_non_params=lambda _: 0,
            is_leaf=lambda node: isinstance(node, optax.MaskedNode),
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
        if isinstance(label, Label):
            before = path[: -len(label.path) - 1]  # without the value's index on its owner
            spelled = f"state{jax.tree_util.keystr(before)}[{label.number}]{jax.tree_util.keystr(label.path)}"
            names.append((spelled, label.number))
        else:
            names.append((f"state{jax.tree_util.keystr(path)}", None))
    return names


def write(folder: str, asked: Asked, held: Mapping[str, Part]) -> dict[str, Any]:
    """Write parts into a new folder; return the parts' entries in the manifest.

    Arguments:
      asked: the parts that this worker owns.
      held: those that it holds as a caller.
    """
    arrays: files.Arrays = {}
    entries: dict[str, Any] = {}
    owned = [(name, name, *_taken(work)) for name, work in asked]
    for name, inside, part, more in [*owned, *((name, "", part, {}) for name, part in held.items())]:
        described = {place: _described(leaf, f"save: {inside}{place}", arrays) for place, leaf in part.items()}
        entries[name] = {"folder": pathlib.Path(folder).name, "leaves": described, **more}
    files.write(folder, arrays)
    return entries


def _taken(work: Work) -> tuple[Part, dict[str, Any]]:
    """Return a part that this worker owns, and more fields of its entry in the manifest."""
    value = _value_here(work.identifier)
    if work.share is None:
        return _leaves_of_value(value), {}
    values, state = value.state()
    found, of_number = _named_leaves(value, values, state, work.numbers)
    return found, {"numbers": list(work.numbers), "of_number": of_number}


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
    values, state = owned.state()
    known, _ = _named_leaves(owned, values, state, work.numbers)
    saved: dict[str, Description] = {}
    whole, then = part.rpartition("/")[0], list[list[int]]()
    for name, entry in reader.parts.items():
        if name.startswith(f"{whole}/"):
            then.append(entry["numbers"])
            numbered, there = entry["of_number"], reader.part(name)
            saved |= {place: one for place, one in there.items() if numbered.get(place) in work.numbers}
            if work.numbers[0] in entry["numbers"]:  # leaves of all of an owner's values
                saved |= {place: one for place, one in there.items() if place not in numbered}
    is_undivided = any(name.startswith(UNDIVIDED) for name in known)
    if is_undivided and then and list(work.numbers) not in then:
        owners = [f"({', '.join(map(str, each))})" for each in (*then, work.numbers)]
        raise CheckpointError(
            f"restore of {reader.folder} on {current_worker().info}: {whole}: optax cannot tell which parts of this "
            "transformation's state belong to which value, so the state fits only owners of the same values as when it "
            f"was saved: {', '.join(owners[:-1])}. This one has {owners[-1]} (numbers in the optimizer's list). "
            "Nothing was restored on any worker."
        )
    ordered = iter(reader.fitting(saved, known, part).values())
    restored = {number: _filled(value, ordered) for number, value in enumerate(values)}
    states = jax.tree.unflatten(jax.tree.structure(state), list(ordered))
    return functools.partial(owned.put_back, {"values": restored, "states": {0: states}})


def _filled(value: Any, found: Iterator[Any]) -> Any:
    return trees.map_leaves(lambda leaf: None if leaf is None else next(found), value)
