"""Pullbacks on the callee: compiled once per shape for functions that are pure by contract, else run as written."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.interpreters import ad

from jdistgrad.autograd.callee.derivatives import Orders, Outputs, differentiated, explained, pulled, transposed
from jdistgrad.autograd.callee.functions import (
    STATIC,
    TRACED,
    changing_state,
    differentiable_arrays,
    handled_by_jit,
    is_pure,
    made_of,
    nothing_hidden,
    state_among,
)
from jdistgrad.autograd.values.holes import Hole, Layout, is_array, made, split
from jdistgrad.rpc.functions import JITTED, Args
from jdistgrad.rpc.futures import answer_of

VARIABLE, ARRAY = "variable", "array"
STATICS_COMPILED = 16  # the most combinations of non-array arguments to compile for


@dataclasses.dataclass
class Differentiated:
    """A function's result, and a pullback for each order."""

    result: Any
    pullbacks: list[Any]
    shapes: tuple[tuple[tuple[int, ...], Any], ...]  # shapes and dtypes of the differentiable results
    compiled: "Compiled | None"
    state: Any = None  # that the run started from, if the function changes state

    def linear(
        self, order: int, live: tuple[int, ...] | None, inputs: list[Any], maps: "tuple[Map, ...]" = ()
    ) -> list[Any]:
        """Pull the cotangents of the live results (those of others are zero), or if ``live`` is None, push tangents."""
        linear = _linear if self.compiled is None else self.compiled.linear
        return list(linear(self.pullbacks[order], live, inputs, self.shapes, maps))


@dataclasses.dataclass(frozen=True)
class Map:
    """A batch that a pull or a push is mapped over. ``flags``: which inputs have the batch dimension, at ``axis``."""

    flags: tuple[bool, ...]
    axis: int
    size: int


def differentiate(
    function: Any, layout: Layout, operands: Sequence[Any], orders: Orders, *, references: bool
) -> Differentiated:
    """Run a function on the layout filled with the operands; return its result and a pullback for each order.

    ``references``: whether there are references among the arguments. Their values are known only when the function
    runs, so it is not compiled.
    """
    args, kwargs = layout.tree
    with explained(function), changing_state(function, args) as (args, state):
        layout = Layout((args, kwargs), layout.positions)
        compiled = _compiled_for(function, layout, orders) if is_pure(function) and not references else None
        if compiled is not None:
            result, left, pullbacks = compiled.forward(list(operands), layout)
        else:
            result, left, pullbacks = _as_written(function, layout, operands, orders)
        if state is not None:
            state.left = left
    shapes = tuple((one.shape, one.dtype) for one in differentiable_arrays(result))
    return Differentiated(result, pullbacks, shapes, compiled, None if state is None else state.value)


def _as_written(function: Any, layout: Layout, operands: Sequence[Any], orders: Orders) -> tuple[Any, Any, list[Any]]:
    found: list[Layout] = []

    def primal(*variables: Any) -> tuple[list[Any], Any]:
        args, kwargs = layout.fill(variables)
        result = answer_of(function(*args, **kwargs))
        results, arrays = split(result, is_array)
        found.append(nothing_hidden(results, function))
        return differentiable_arrays(result), (arrays, _left(function, args))

    _, pullbacks, (arrays, left) = differentiated(primal, operands, orders)
    return found[0].fill(arrays), left, pullbacks


def _left(function: Any, args: Args) -> Any:
    state = state_among(function, args)
    return None if state is None else state.left


def _linear(pullback: Any, live: tuple[int, ...] | None, inputs: list[Any], shapes: Any, maps: tuple[Map, ...]) -> Any:
    def linear(*inputs: Any) -> Any:
        if live is None:
            return transposed(pullback, inputs, shapes)
        known = dict(zip(live, inputs, strict=True))
        zero = lambda shape: ad.Zero(jax.core.ShapedArray(*shape))  # noqa: E731 stays zero times infinity
        return pulled(pullback, [known[k] if k in known else zero(shape) for k, shape in enumerate(shapes)])

    mapped: Any = linear
    for one in maps:
        axes = [one.axis if flag else None for flag in one.flags]
        mapped = jax.vmap(mapped, axes, one.axis, axis_size=one.size)
    return mapped(*made(inputs))


class Compiled:
    """A function compiled together with its pullbacks, for one structure of arguments.

    ``linear`` is ``_linear`` of these pullbacks, compiled: JAX keeps what it has compiled for a function as long as
    that function.
    """

    def __init__(self, function: Any, structure: Any, kinds: tuple[Any, ...], orders: Orders):
        self._kinds = kinds

        def forward(variables: list[Any], constants: list[Any]) -> Outputs:
            def primal(*variables: Any) -> tuple[list[Any], Any]:
                parts = {VARIABLE: iter(variables), ARRAY: iter(constants)}
                leaves = [next(parts[kind]) if kind in parts else value for kind, value in kinds]
                args, kwargs = jax.tree.unflatten(structure, leaves)
                result = function(*args, **kwargs)
                return differentiable_arrays(result), (result, _left(function, args))

            _, pullbacks, (result, left) = differentiated(primal, variables, orders)
            return Outputs.of((result, left, pullbacks), [*variables, *constants])

        self._forward = jax.jit(forward)
        self.linear = jax.jit(lambda *arguments: _linear(*arguments), static_argnums=(1, 3, 4))

    def forward(self, variables: list[Any], layout: Layout) -> tuple[Any, Any, list[Any]]:
        """Return the function's result, the state that it leaves (None: the same), and its pullbacks."""
        leaves = jax.tree.leaves(layout.tree)
        constants = [leaf for leaf, kind in zip(leaves, self._kinds, strict=True) if kind[0] is ARRAY]
        outputs: Outputs = self._forward(variables, constants)
        result, left, pullbacks = outputs.filled([*variables, *constants])
        return result, left, pullbacks


class CompiledForms:
    """What has been compiled for functions, and for which values of non-array arguments, by function and kinds."""

    def __init__(self, of: Any, most: int):
        self.of = weakref.ref(of)
        self.compiled = functools.lru_cache(most)(Compiled)
        self.statics: Callable[..., set[Hashable]] = functools.lru_cache(most)(lambda *arguments: set())

    def __reduce__(self) -> Any:
        return type(None), ()  # stays here when the function that keeps it is sent


_all_others = CompiledForms(CompiledForms, 1024)
KEPT_AS = "_jdistgrad_programs"


def _programs_for(function: Any) -> CompiledForms:
    """Return what has been compiled for a function.

    A jitted function keeps its own, as it may close over much: a table of ours would keep that when the user has
    dropped the function.
    """
    function = made_of(function)
    if not isinstance(function, JITTED):
        return _all_others
    found = vars(function).get(KEPT_AS)
    if found is None or found.of() is not function:  # functools.wraps copies what a function keeps
        found = vars(function)[KEPT_AS] = CompiledForms(function, 64)
    return found


def _compiled_for(function: Any, layout: Layout, orders: Orders) -> Compiled | None:
    """Return the compiled form, or None if compiling does not pay: non-array arguments that keep changing."""
    try:
        leaves, structure = jax.tree.flatten(layout.tree)
        kinds = tuple(map(_kind, leaves, handled_by_jit(function, *layout.tree)))
        programs = _programs_for(function)
        seen = programs.statics(function, tuple(kind for kind, _ in kinds))
        if not pays(seen, kinds):
            return None
    except TypeError:  # an argument that cannot be hashed, or a dict with keys that cannot be sorted
        return None
    return programs.compiled(function, structure, kinds, orders)


def pays(seen: set[Hashable], arguments: Hashable) -> bool:
    """Return whether to compile for these non-array arguments: only for the first few combinations."""
    if len(seen) < STATICS_COMPILED:  # others are not kept: there may be one for each call, and it may be large
        seen.add(arguments)
    return arguments in seen


def _kind(leaf: Any, by_jit: str) -> tuple[Any, Any]:
    """Return how compiled code takes a leaf: as an argument or a constant. An integer may be an axis: a constant."""
    if isinstance(leaf, Hole):
        return VARIABLE, None
    is_number = isinstance(leaf, float | complex) or (by_jit == TRACED and type(leaf) in (int, bool))
    return (ARRAY, None) if by_jit != STATIC and (is_number or is_array(leaf)) else (type(leaf), leaf)
