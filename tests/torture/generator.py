"""Programs drawn from seeds. Pure functions: the same seed and features give the same program everywhere."""

import dataclasses
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from helpers.schedules import random_schedule

from jdistgrad.pipeline import Schedule, gpipe, one_f_one_b, zero_bubble
from torture import containers, palette
from torture.programs import FEATURES, AnyProgram, Node, ParallelProgram, PipelineProgram, Program, Step

SMALL = ((3,), (2, 3), (4, 1))
LARGE = (300, 300)
BODIES = 6  # the number of jitted functions that call others: few, since every worker compiles each of them

TREES = ("one", "two", "three", "deep")
KINDS = ("compiled", "python", "average", "sums", "optimizer", "sharded")
AGREED_ON = ("compiled", "average", "optimizer")  # DataParallel's steps, which ranks may take in different orders


class Chance:
    """Random choices for one program, among those that the features allow."""

    def __init__(self, seed: Any, features: Collection[str]):
        self.random, self.features = random.Random(str(seed)), frozenset(features)
        self.later = random.Random(f"{seed} later")  # for what was added later: without it the programs stay the same

    def has(self, feature: str) -> bool:
        return feature in self.features

    def wants(self, feature: str, share: float) -> bool:
        """Draw whether this program has a feature: never if the feature is switched off."""
        found = self.random.random() < share
        return found and self.has(feature)

    def one(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def several(self, low: int, high: int, count: int) -> tuple[int, ...]:
        return tuple(self.number(low, high) for _ in range(count))


def draw(seed: int, features: Collection[str] = tuple(FEATURES)) -> AnyProgram:
    """Return the program of a seed. Every fifth program is data parallel, and every fifth is a pipeline."""
    chance = Chance(seed, features)
    if chance.has("parallel") and seed % 5 == 4:
        return draw_parallel(seed, chance)
    if chance.has("pipelines") and seed % 5 == 2:
        return draw_pipeline(seed, chance)
    return draw_program(seed, chance)


def draw_program(seed: int, chance: Chance) -> Program:
    large = chance.wants("large", 0.2)
    order = chance.one((2, 2, 3, 3)) if chance.wants("high", 0.4) else chance.one((0, 1, 1))
    mode = chance.one(("jd.jit", "jax.jit")) if chance.wants("compiled", 0.5) else "eager"
    body = Drawing(chance, large=large, compiled=mode != "eager")
    count = chance.number(1, 3 if large or order > 1 else 6)
    return Program(
        seed=seed,
        shape=LARGE if large else chance.one(SMALL),
        weak=chance.wants("weak", 0.2) and not large,
        held=chance.number(0, 3) if chance.wants("held", 0.3) else None,
        nodes=tuple(body.nodes(count)),
        used=chance.several(0, 20, chance.number(1, count + 2)),
        order=min(order, 2) if large else order,
        mode=mode,
        crowd=chance.wants("crowd", 0.2),
    )


class Drawing:
    """The drawing of the calls of a program, or of a function that a program calls.

    Arguments:
      large: whether there must be work for XLA's threads.
      compiled: whether all values are traced: only a value that has data can become a reference.
    """

    def __init__(self, chance: Chance, *, large: bool, compiled: bool):
        self._chance, self._large, self._compiled = chance, large, compiled

    def nodes(self, count: int) -> Iterator[Node]:
        for _ in range(count):
            deep = self._chance.wants("nested", 0.5 if self._large else 0.25)
            yield self._nested(2) if deep else self._node()

    def _node(self) -> Node:
        """Draw a call or a reference: its function, and the way to make it."""
        chance, pack, function = self._chance, "", self._function()
        how = chance.one(("sync", "sync", "eventually"))
        if chance.wants("remote", 0.5):
            how = chance.one(("remote", "remote", "fetched", "handed", "kept", "remote" if self._compiled else "own"))
        elif chance.wants("vmap", 0.15):
            how = "mapped"
        if how in ("sync", "eventually", "fetched", "handed"):
            function, pack = self._with_other_results(function)
        to, arguments = chance.number(0, 3), chance.several(0, 20, 2)
        if chance.has("owners") and chance.later.random() < 0.2:
            return Node(chance.later.choice(("averaged", "masked", "normed", "decayed")), "", to, arguments)
        return Node(how, function, to, arguments, pack)

    def _function(self) -> str:
        chance, names = self._chance, palette.PLAIN
        if self._large:
            names = (*names, "many", "many")
        if chance.wants("odd_rules", 0.25):
            names = palette.ODD_RULES
        elif chance.wants("weak", 0.25):
            names = palette.OF_TYPES
        return self._jitted(chance.one(names))

    def _with_other_results(self, function: str) -> tuple[str, str]:
        """Keep the function, or draw one that returns more than an array; return it and its arguments' container."""
        if self._chance.wants("containers", 0.25):
            return self._jitted("inside"), self._chance.one(tuple(containers.MAKERS))
        return (self._jitted("noisy") if self._chance.wants("keys", 0.15) else function), ""

    def _jitted(self, name: str) -> str:
        return f"fast_{name}" if self._chance.wants("jitted", 0.5) else name

    def _nested(self, depth: int) -> Node:
        """Draw a call of a function that makes calls itself. If it is jitted, it is one of a few functions."""
        chance, to, arguments = self._chance, self._chance.number(0, 3), self._chance.several(0, 20, 2)
        if chance.wants("jitted", 0.5):
            name = f"body {chance.number(0, BODIES - 1)} of depth {depth}, large: {self._large}"
            drawing = Drawing(Chance(name, chance.features), large=self._large, compiled=True)
            return Node("fast_nested", "", to, arguments, body=drawing.body(depth))
        return Node("nested", "", to, arguments, body=self.body(depth))

    def body(self, depth: int) -> tuple[Node, ...]:
        """Draw the calls of a function that makes calls itself."""
        found = [self._node() for _ in range(self._chance.number(1, 2))]
        if depth > 1 and self._chance.wants("nested", 0.5):
            found.append(self._nested(depth - 1))
        return tuple(found)


def draw_parallel(seed: int, chance: Chance) -> ParallelProgram:
    odd = chance.wants("orders", 0.5)
    trees = TREES if chance.has("large") else TREES[:-1]
    drawn = [Step(chance.one(AGREED_ON if odd else KINDS), chance.one(trees)) for _ in range(chance.number(2, 4))]
    steps = tuple(dict.fromkeys(drawn)) if len(set(drawn)) > 1 else (Step("compiled", "one"), Step("compiled", "two"))
    order = (*range(len(steps)), *chance.several(0, len(steps) - 1, 2))
    program = ParallelProgram(seed, steps, order, None, order, warm=chance.one((True, True, False)))
    return dataclasses.replace(program, **disagreement(chance, order)) if odd else program


def draw_pipeline(seed: int, chance: Chance) -> PipelineProgram:
    stages, large = chance.number(1, 5), chance.wants("large", 0.2)
    inputs = [(), *((k - 1, *chance.several(0, k - 1, chance.number(0, 2))) for k in range(1, stages))]
    functions = [chance.one(("mix", "bend")) for _ in range(stages)]
    microbatches = chance.number(1, 6)
    return PipelineProgram(
        seed=seed,
        shape=LARGE if large else (microbatches + chance.number(0, 5), chance.number(1, 4)),
        functions=tuple(f"fast_{name}" if chance.wants("jitted", 0.3) else name for name in functions),
        inputs=tuple(inputs),
        shared=tuple(chance.number(0, k) for k in range(stages)),
        remat=tuple(chance.one((True, False, False)) for _ in range(stages)),
        schedule=draw_schedule(chance, inputs, microbatches).text(),
        steps=chance.number(1, 2),
    )


def draw_schedule(chance: Chance, inputs: Sequence[tuple[int, ...]], microbatches: int) -> Schedule:
    """Draw a schedule of the literature, or one of any order in which the stages are on any workers."""
    stages = len(inputs)
    known = [gpipe, one_f_one_b, zero_bubble] if stages <= 4 else []
    make = chance.one([*known, None])
    if make is not None:
        return make(stages, microbatches)
    workers = chance.number(1, min(stages, 4))
    placement = [*range(workers), *chance.several(0, workers - 1, stages - workers)]
    return random_schedule(chance.random, inputs, placement, microbatches)


def disagreement(chance: Chance, order: tuple[int, ...]) -> dict[str, Any]:
    """Draw a rank that takes two steps in the other order, or leaves out the last step."""
    k = chance.number(0, len(set(order)) - 2)  # the first steps are all different
    swapped = (*order[:k], order[k + 1], order[k], *order[k + 2 :])
    return {"odd_rank": chance.number(0, 3), "odd_order": chance.one((swapped, swapped, order[:-1]))}
