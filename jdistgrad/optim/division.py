"""A traced program divided among the owners of its inputs: what each computes, and which numbers travel.

Pure. An equation runs where its inputs are. What depends on no owner's values is computed wherever it is needed. An
equation of several owners' values takes numbers only (a norm's parts, a test for NaN), which all owners get.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jdistgrad import jaxprs
from jdistgrad.autograd.staged.equations import INLINED

HERE = -1  # the place of inputs and results that no owner has

_INNER = {"call_jaxpr", "jaxpr"}  # the parameters of equations that run one jaxpr once


class MixedError(ValueError):
    """An equation takes arrays of several owners."""


@dataclasses.dataclass(frozen=True)
class OwnersPart:
    """What one place computes in one round.

    ``inputs``: the numbers of the program's inputs that it takes; ``here``: of those that are HERE. ``outputs``:
    numbers of variables. ``sent``: the shapes of those that other places need. ``function`` computes the outputs, and
    the bytes of what is sent, in one array, from the inputs and from the arrays of bytes of earlier rounds.
    """

    inputs: tuple[int, ...]
    here: tuple[int, ...]
    outputs: tuple[int, ...]
    sent: dict[Any, jax.ShapeDtypeStruct]
    function: Callable[..., tuple[list[Any], jax.Array]]

    def compute(self, known: Mapping[int, Any], earlier: Sequence[Any]) -> tuple[dict[int, Any], jax.Array]:
        """Return outputs by numbers, and the bytes that are sent, from inputs by numbers and what was sent earlier."""
        found, packed = self.function([known[k] for k in self.inputs], list(earlier))
        return dict(zip(self.outputs, found, strict=True)), packed

    @property
    def size(self) -> int:
        """Return how many bytes are sent."""
        return sum(map(_size, self.sent.values()))


class Division:
    """A program divided among places.

    Arguments:
      closed: the program, a closed jaxpr, with inner calls inlined: see ``inlined``.
      places: the place of each input.
      wanted: where each output is wanted.
      sharing: the places that have what is HERE, each a copy, if there is no place HERE.

    Attributes:
      outputs: the number of the variable of each output.
      literals: the values of outputs that are literals, by their numbers.
      rounds: for each round the parts that run in it, by their places. The last has the part of HERE, if any.

    Raises:
      MixedError: an equation takes arrays of several owners.
    """

    def __init__(self, closed: Any, places: Sequence[int], wanted: Sequence[int], sharing: Collection[int] = ()):
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
        ends = list(zip(jaxpr.outvars, wanted, strict=True))
        literals: dict[int, Any] = {-1 - k: one for k, (one, _) in enumerate(ends) if isinstance(one, core.Literal)}
        with jax.ensure_compile_time_eval():  # JAX may trace a step meanwhile
            self.literals = {k: jnp.asarray(one.val, one.aval.dtype) for k, one in literals.items()}
        self.outputs = [-1 - k if -1 - k in literals else self._numbers[one] for k, (one, _) in enumerate(ends)]
        ends = [end for k, end in enumerate(ends) if -1 - k not in literals]
        self._sent |= {one for one, place in ends if self._place_of(one) not in (HERE, place)}
        self.rounds = self._rounds(ends, {*places, *wanted} - {HERE}, sharing)

    def carry_out(self, call: Callable[[int, Sequence[int], Sequence[Any]], Sequence[Any]]) -> list[Any]:
        """Carry out the rounds; return all that is sent.

        ``call(number, owners, sent)`` carries out a round on owners; it returns what each of them sends.
        """
        sent = list[Any]()
        for number, parts in enumerate(self.rounds):
            owners = sorted(parts.keys() - {HERE})
            answers = call(number, owners, tuple(sent))
            sent += [one for one, owner in zip(answers, owners, strict=True) if parts[owner].sent]
        return sent

    def senders(self, number: int) -> list[OwnersPart]:
        """Return the parts before a round that send, in the order in which all know what they send."""
        return [part for parts in self.rounds[:number] for _, part in sorted(parts.items()) if part.sent]

    def is_last(self, number: int, place: int) -> bool:
        """Return whether a round is the last of a place."""
        return not any(place in parts for parts in self.rounds[number + 1 :])

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

    def _rounds(
        self, ends: Sequence[tuple[Any, int]], owners: Iterable[int], sharing: Collection[int]
    ) -> list[dict[int, OwnersPart]]:
        """Return the parts of each round. An owner makes its outputs in its last."""
        asked: dict[tuple[int, int], dict[Any, None]] = {}
        for variable in self._sent:
            place, since = self._placed[variable]
            asked.setdefault((since, place), {})[variable] = None
        for place in {*owners, *sharing}:  # also one whose outputs are all literals
            mine = [one for one, wanted in ends if wanted == place or (wanted == HERE and place in sharing)]
            sends = [since for since, at in asked if at == place]
            last = max((*sends, *(self._since(one, place) for one in mine)), default=0)
            asked.setdefault((last, place), {}).update(dict.fromkeys(mine))
        count = 1 + max((since for since, _ in asked), default=0)
        rounds: list[dict[int, OwnersPart]] = [{} for _ in range(count)]
        for (since, place), targets in sorted(asked.items(), key=lambda one: one[0]):
            rounds[since][place] = self._part(sorted(targets, key=self._order), since, place)
        mine = [one for one, place in ends if place == HERE]
        if mine and not sharing:
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
        given = [one for one in taken if one not in self._made and self._placed[one][0] in (HERE, place)]
        sent = {
            one: jax.ShapeDtypeStruct(one.aval.shape, one.aval.dtype)
            for one in targets
            if one in self._sent and self._placed[one] == (place, since)
        }

        @jax.jit
        def function(arrays: list[Any], earlier: list[Any]) -> tuple[list[Any], Any]:
            # In the dtypes of the program: a state's may be those of before its first update.
            typed = {one: array.astype(one.aval.dtype) for one, array in zip(given, arrays, strict=True)}
            values = self._consts | typed
            for sender, data in zip(self.senders(since), earlier, strict=True):
                values.update(_unpacked(sender.sent, data))
            jaxprs.run(equations, values)
            octets = (jnp.ravel(values[one]).view(jnp.uint8) for one in sent)
            return [values[one] for one in targets], jnp.concatenate([jnp.zeros(0, jnp.uint8), *octets])

        def numbers(variables: Iterable[Any]) -> tuple[int, ...]:
            return tuple(self._numbers[one] for one in variables)

        here = numbers(one for one in given if self._placed[one][0] == HERE)
        return OwnersPart(numbers(given), here, numbers(targets), sent, function)


def _unpacked(shapes: Mapping[Any, jax.ShapeDtypeStruct], data: Any) -> dict[Any, Any]:
    """Return the arrays whose bytes these are."""
    ends = list(itertools.accumulate(map(_size, shapes.values())))
    parts = jnp.split(data, ends[:-1])
    return {
        key: part.view(one.dtype).reshape(one.shape) for (key, one), part in zip(shapes.items(), parts, strict=True)
    }


def _size(one: jax.ShapeDtypeStruct) -> int:
    return math.prod(one.shape) * one.dtype.itemsize


def _is_number(variable: Any) -> bool:
    return math.prod(variable.aval.shape) <= 1


def inlined(closed: Any) -> Any:
    """Return a closed jaxpr without inner calls, and with selections in place of ``cond``."""
    return jax.make_jaxpr(functools.partial(_evaluate, closed.jaxpr, closed.consts))(*closed.in_avals)


def _evaluate(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for equation in jaxpr.eqns:
        inputs = [jaxprs.read(values, atom) for atom in equation.invars]
        inner = [equation.params[name] for name in _INNER & set(equation.params) if equation.primitive.name in INLINED]
        if equation.primitive.name == "cond":
            outputs: Iterable[Any] = _selected(equation.params["branches"], *inputs)
        elif inner:
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
