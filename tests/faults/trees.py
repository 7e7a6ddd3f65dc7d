"""Ranks whose trees or settings differ: before anything is reduced, every rank is told what differs."""

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd
from faults.outcomes import Outcome
from faults.program import judged

Tree = dict[str, Any]


def layer(inputs: int, outputs: int) -> Tree:
    return {"w": jnp.ones((inputs, outputs)), "b": jnp.ones(outputs)}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["rate", "activation"])
@dataclasses.dataclass(frozen=True)
class Module:
    w: Any
    rate: float = 0.1
    activation: Callable[..., Any] = jnp.tanh


def base() -> Tree:
    layers = [layer(3, 4), layer(4, 2), layer(2, 5)]
    own = {"scale": jnp.ones(()), "table": jnp.ones((6, 2), jnp.bfloat16), "bias": jnp.ones(7)}
    return {"layers": layers, "module": Module(jnp.ones((2, 2))), **own}


def half_of_squares(tree: Tree) -> Any:
    """Return a loss whose gradients are the parameters."""
    return sum((leaf.astype(jnp.float32) ** 2).sum() for leaf in jax.tree.leaves(tree)) / 2


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A change of one rank's tree or settings. ``harmless``: it changes no number, so nothing must happen."""

    name: str
    change: Callable[[random.Random, Tree], Any]
    harmless: bool = False


def on_a_leaf(change: Callable[[random.Random, jax.Array], Any]) -> Callable[[random.Random, Tree], Tree]:
    def changed(chance: random.Random, tree: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(tree)
        place = chance.randrange(len(leaves))
        leaves[place] = change(chance, leaves[place])
        return jax.tree.unflatten(structure, leaves)

    return changed


def longer(chance: random.Random, leaf: jax.Array) -> Any:
    axis = chance.randrange(leaf.ndim + 1)
    shape = list(leaf.shape)
    if axis == leaf.ndim:
        shape.append(chance.randint(2, 3))
    else:
        shape[axis] += chance.randint(1, 3)
    return jnp.ones(shape, leaf.dtype)


def another_dtype(chance: random.Random, leaf: jax.Array) -> Any:
    others = [dtype for dtype in (jnp.float32, jnp.float16, jnp.bfloat16) if dtype != leaf.dtype]
    return leaf.astype(chance.choice(others))


def without_a_key(chance: random.Random, tree: Tree) -> Tree:
    gone = chance.choice(sorted(tree))
    return {key: value for key, value in tree.items() if key != gone}


def with_a_key(chance: random.Random, tree: Tree) -> Tree:
    return {**tree, f"new{chance.randrange(100)}": jnp.ones(chance.randrange(1, 4))}


def renamed(chance: random.Random, tree: Tree) -> Tree:
    old = chance.choice(sorted(tree))
    return {(f"{key}_" if key == old else key): value for key, value in tree.items()}


def layers_in_another_order(chance: random.Random, tree: Tree) -> Tree:
    first, *rest = tree["layers"]
    return {**tree, "layers": [*rest, first]}


def fewer_layers(chance: random.Random, tree: Tree) -> Tree:
    return {**tree, "layers": tree["layers"][: chance.randrange(3)]}


def another_static_part(chance: random.Random, tree: Tree) -> Tree:
    changed = chance.choice([{"rate": chance.random()}, {"activation": chance.choice([jax.nn.relu, jnp.sin])}])
    return {**tree, "module": dataclasses.replace(tree["module"], **changed)}


def keys_in_another_order(chance: random.Random, tree: Tree) -> Tree:
    return dict(sorted(tree.items(), key=lambda item: chance.random()))


TREES = (
    Mutation("shape", on_a_leaf(longer)),
    Mutation("dtype", on_a_leaf(another_dtype)),
    Mutation("a leaf less", without_a_key),
    Mutation("a leaf more", with_a_key),
    Mutation("path", renamed),
    Mutation("order of layers", layers_in_another_order),
    Mutation("fewer layers", fewer_layers),
    Mutation("a static part", another_static_part),
    Mutation("order of keys", keys_in_another_order, harmless=True),
    Mutation("a NumPy array", on_a_leaf(lambda chance, leaf: np.asarray(leaf)), harmless=True),
)

SETTINGS = (
    {"bucket_cap_mb": 2},
    {"hook": jd.hooks.float16()},
    {"check_finite": True},
    {"find_unused_parameters": True},
    {"sparse": ["['bias']"]},
)


def play(chance: random.Random, count: int) -> Iterator[Outcome]:
    """Average a tree that is another one on one rank, by ``average``, ``jax.jit``, a step, or under other settings."""
    me, dp = jd.init(timeout=30), None
    for _ in range(count):
        if dp is None:
            dp = jd.DataParallel(timeout=SECONDS)
            known = jax.jit(dp.average)
            jax.block_until_ready(known(base()))
        victim, how = chance.randrange(jd.world_size()), chance.choices(HOW, (5, 5, 1, 3, 3))[0]
        if how == "settings":
            setting = chance.choice(SETTINGS)
            average = jd.DataParallel(timeout=SECONDS, **(setting if me.rank == victim else {})).average
            fault, mine, harmless = f"settings {setting} on rank {victim}", base(), False
        else:
            mutation = chance.choice(TREES)
            changed = mutation.change(chance, base())
            average = {
                "called": dp.average,
                "compiled": jax.jit(dp.average),
                "compiled before": known,
                "a step": functools.partial(gradients_of, dp.value_and_grad(half_of_squares)),
            }[how]
            fault, mine = f"{mutation.name} on rank {victim}, {how}", changed if me.rank == victim else base()
            harmless = mutation.harmless
        problem, crossed = problem_of(average, mine, harmless=harmless)
        dp = None if crossed else dp
        yield judged(fault, problem or not_right_after(dp), named=not harmless)
    jd.shutdown()


HOW = "called", "compiled", "compiled before", "settings", "a step"


def gradients_of(step: Callable[[Tree], Any], tree: Tree) -> Tree:
    return step(tree)[1]


# Where one rank knows the compiled program of a tree and another does not, the two wait in different meetings. Then
# both raise this after their timeout, and must make a new DataParallel.
CROSSED = "MissingRanksError"
SECONDS = 5.0


def problem_of(average: Callable[[Tree], Tree], mine: Tree, *, harmless: bool) -> tuple[str, bool]:
    """Average; return what was not as promised, and whether the ranks have come apart."""
    try:
        found = jax.block_until_ready(average(mine))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        named = "DisagreementError" in text or CROSSED in text
        return text if harmless or not named else "", CROSSED in text
    if not harmless:
        return "nothing was said", False
    right = all((np.asarray(leaf, np.float32) == 1).all() for leaf in jax.tree.leaves(found))
    return "" if right else f"the averages are {found}", False


def not_right_after(dp: jd.DataParallel | None) -> str:
    """Return how the next average is wrong, if it is."""
    dp = dp or jd.DataParallel(timeout=30)
    found = dp.average({"w": jnp.full(3, float(jd.rank()))})["w"]
    right = (np.asarray(found) == (jd.world_size() - 1) / 2).all()
    return "" if right else f"the next average was {found}"
