"""A traced program divided among the owners of its inputs: what each computes, and which numbers travel.

Pure. An equation runs where its inputs are. What depends on no owner's values is computed wherever it is needed. An
equation of several owners' values takes numbers only (a norm's parts, a test for NaN), which all owners get.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jdistgrad import jaxprs

HERE = -1  # the place of inputs and results that no owner has

_INNER = {"call_jaxpr", "jaxpr"}  # the parameters of equations that run one jaxpr once
_LOOPS = {"scan", "while"}


class MixedError(ValueError):
    """An equation takes arrays of several owners."""


@dataclasses.dataclass(frozen=True)
class OwnersPart:
    """What one place computes in one round.

    ``inputs``, ``outputs``: numbers of variables. ``given``: those of inputs that are sent to the place: numbers that
    earlier rounds have returned. ``function`` computes the outputs from the inputs.
    """

    inputs: tuple[int, ...]
    given: tuple[int, ...]
    outputs: tuple[int, ...]
    function: Callable[..., list[Any]]


class Division:
    """A program divided among places.

    Arguments:
      closed: the program, a closed jaxpr, with inner calls inlined: see ``inlined``.
      places: the place of each input.
      wanted: where each output is wanted.

    Attributes:
      outputs: the number of the variable of each output.
      literals: the values of outputs that are literals, by their numbers.
      sent: the numbers of the variables that their owners return.
      rounds: for each round the parts that run in it, by their places. The last has the part of HERE.

    Raises:
      MixedError: an equation takes arrays of several owners.
    """

    def __init__(self, closed: Any, places: Sequence[int], wanted: Sequence[int]):
        jaxpr = closed.jaxpr
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._made: dict[Any, Any] = {variable: one for one in jaxpr.eqns for variable in one.outvars}
        self._placed: dict[Any, tuple[int, int]] = dict(
            zip(jaxpr.invars, ((place, 0) for place in places), strict=True)
        )
        self._sent: set[Any] = set()  # what owners return in the round in which it is computed
        for equation in jaxpr.eqns:
            self._placed.update(dict.fromkeys(equation.outvars, self._place(equation)))
        variables = [*jaxpr.invars, *self._made, *self._consts]
        self._numbers = {variable: k for k, variable in enumerate(variables)}
        self.literals = {-1 - k: one.val for k, one in enumerate(jaxpr.outvars) if isinstance(one, core.Literal)}
        self.outputs = [
            -1 - k if -1 - k in self.literals else self._numbers[one] for k, one in enumerate(jaxpr.outvars)
        ]
        ends = [
            (one, place) for one, place in zip(jaxpr.outvars, wanted, strict=True) if not isinstance(one, core.Literal)
        ]
        self._sent |= {one for one, place in ends if self._place_of(one) not in (HERE, place)}
        self.rounds = self._rounds(ends, wanted)
        self.sent = {self._numbers[one] for one in self._sent}

    def _is_known(self, atom: Any) -> bool:
        return isinstance(atom, core.Literal) or atom in self._consts

    def _place_of(self, atom: Any) -> int:
        return HERE if self._is_known(atom) else self._placed[atom][0]

    def _place(self, equation: Any) -> tuple[int, int]:
        """Return the place of an equation, and the round in which it can run. Numbers are sent to arrays."""
        found = [(one, *self._placed[one]) for one in equation.invars if not self._is_known(one)]
        owners = {place for _, place, _ in found} - {HERE}
        of_arrays = {place for one, place, _ in found if not _is_number(one)} - {HERE}
        if len(of_arrays) > 1:
            raise MixedError(f"{equation.primitive} takes arrays of ranks {sorted(of_arrays)} together")
        # A sum of numbers of all owners, one after the other, must not travel from one to the next.
        is_late = any(place == HERE and since for _, place, since in found)
        is_common = is_late and all(map(_is_number, (*(one for one, *_ in found), *equation.outvars)))
        place = HERE
        if of_arrays or (len(owners) == 1 and not is_common):
            (place,) = of_arrays or owners
        self._sent |= {one for one, at, _ in found if at not in (HERE, place)}
        return place, max((since + (at not in (HERE, place)) for _, at, since in found), default=0)

    def _rounds(self, ends: Sequence[tuple[Any, int]], places: Iterable[int]) -> list[dict[int, OwnersPart]]:
        """Return the parts of each round. An owner makes its outputs in its last."""
        asked: dict[tuple[int, int], dict[Any, None]] = {}
        for variable in self._sent:
            place, since = self._placed[variable]
            asked.setdefault((since, place), {})[variable] = None
        for place in set(places) - {HERE}:  # also one whose outputs are all literals
            mine = [one for one, wanted in ends if wanted == place]
            last = max((self._since(one, place) for one in mine), default=0)
            asked.setdefault((last, place), {}).update(dict.fromkeys(mine))
        count = 1 + max((since for since, _ in asked), default=0)
        rounds: list[dict[int, OwnersPart]] = [{} for _ in range(count)]
        for (since, place), targets in sorted(asked.items(), key=lambda one: one[0]):
            rounds[since][place] = self._part(sorted(targets, key=self._order), since, place)
        mine = [one for one, place in ends if place == HERE]
        if mine:
            rounds[-1][HERE] = self._part(list(dict.fromkeys(mine)), count, HERE)
        return rounds

    def _order(self, variable: Any) -> int:
        return self._numbers.get(variable, -1)

    def _since(self, variable: Any, place: int) -> int:
        """Return the round in which a place can have a variable."""
        if self._is_known(variable):
            return 0
        at, since = self._placed[variable]
        return since + (at not in (HERE, place))

    def _part(self, targets: Sequence[Any], since: int, place: int) -> OwnersPart:
        """Return the part that computes variables, from inputs and from what earlier rounds have returned."""
        needed, inputs = set[Any](), dict[Any, None]()
        waiting = list(targets)
        while waiting:
            one = waiting.pop()
            if self._is_known(one) or one in inputs or one in needed:
                continue
            if one not in self._made or (one in self._sent and self._placed[one][1] < since):
                inputs[one] = None
            else:
                needed.add(one)
                waiting += self._made[one].invars
        order = {id(self._made[one]): self._made[one] for one in sorted(needed, key=self._order)}
        equations, taken = list(order.values()), sorted(inputs, key=self._order)
        constants = self._consts

        @jax.jit
        def function(*arrays: Any) -> list[Any]:
            values = constants | dict(zip(taken, arrays, strict=True))
            jaxprs.run(equations, values)
            return [values[one] for one in targets]

        numbers = tuple(self._numbers[one] for one in taken)
        given = tuple(self._numbers[one] for one in taken if one in self._made or self._placed[one][0] != place)
        return OwnersPart(numbers, given, tuple(self._numbers[one] for one in targets), function)


def _is_number(variable: Any) -> bool:
    return math.prod(variable.aval.shape) <= 1


def inlined(function: Callable[..., Any], *args: Any) -> Any:
    """Trace a function of trees to a closed jaxpr without inner calls, and with selections in place of ``cond``."""
    closed = jax.make_jaxpr(function)(*args)
    return jax.make_jaxpr(functools.partial(_evaluate, closed.jaxpr, closed.consts))(*closed.in_avals)


def _evaluate(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for equation in jaxpr.eqns:
        inputs = [jaxprs.read(values, atom) for atom in equation.invars]
        inner = [equation.params[name] for name in _INNER & set(equation.params)]
        if equation.primitive.name == "cond":
            outputs: Iterable[Any] = _selected(equation.params["branches"], *inputs)
        elif inner and equation.primitive.name not in _LOOPS:
            outputs = _evaluate(getattr(inner[0], "jaxpr", inner[0]), getattr(inner[0], "consts", ()), *inputs)
        else:
            outputs = jaxprs.bind(equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [jaxprs.read(values, atom) for atom in jaxpr.outvars]


def _selected(branches: Sequence[Any], which: Any, *args: Any) -> list[Any]:
    """Compute all branches, whose outputs may belong to several owners, and select those of one."""
    each = [_evaluate(one.jaxpr, one.consts, *args) for one in branches]
    index = jnp.clip(which, 0, len(branches) - 1).astype(jnp.int32)
    return [jax.lax.select_n(index, *map(jnp.asarray, outputs)) for outputs in zip(*each, strict=True)]
