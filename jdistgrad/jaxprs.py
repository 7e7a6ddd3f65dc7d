"""Jaxprs: their evaluation, equation by equation, eagerly or inside another trace; and keys of what they compute.

Equal keys let the workers and objects of one process share compiled code: see ``Shared``.
"""

import collections
import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

_CALLS = ("jit", "pjit")
_WHOLE = (*_CALLS, "remat2", "checkpoint")  # equations that run a whole jaxpr once
_OF_AN_AXIS = "NamedAxisEffect"  # what JAX notes at collectives: for its own use, they call nobody
_ADDRESSES, _SETS = re.compile(r" at 0x[0-9a-f]+"), re.compile(r"frozenset\(\{([^{}]*)\}\)")

# Parameters of equations that only a derivative needs. Compiled pieces are not differentiated any more.
_FOR_DERIVATIVES = {"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "out_trees"}


def read(values: dict[Any, Any], atom: Any) -> Any:
    """Return the value of a variable or a literal."""
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def bind(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs of one equation, evaluated in the context in which it was traced.

    JAX's context managers set that context: where to compute, metadata for XLA, the kind of random bits.
    """
    primitive = equation.primitive
    with equation.ctx.manager:
        outputs = primitive.bind(*inputs, **primitive.get_bind_params(equation.params))
    return outputs if primitive.multiple_results else [outputs]


def run(equations: Sequence[Any], values: dict[Any, Any]) -> None:
    """Run equations on known values, jitted functions inlined, and add the outputs to ``values``."""
    for equation in equations:
        inputs = [read(values, atom) for atom in equation.invars]
        if equation.primitive.name in _CALLS:
            inner = equation.params["jaxpr"]
            outputs: Sequence[Any] = evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            outputs = bind(equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Return the outputs of a jaxpr."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    run(jaxpr.eqns, values)
    return [read(values, atom) for atom in jaxpr.outvars]


def passed_on(jaxpr: Any) -> list[int | None]:
    """Return of each output the number of the input that it is, unchanged; None for what is computed."""
    sources: dict[Any, int] = {variable: k for k, variable in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        if equation.primitive.name in _WHOLE:
            inner = equation.params["jaxpr"]
            for made, number in zip(equation.outvars, passed_on(getattr(inner, "jaxpr", inner)), strict=True):
                given = None if number is None else equation.invars[number]
                if not isinstance(given, core.Literal) and given in sources:
                    sources[made] = sources[given]
    return [None if isinstance(one, core.Literal) else sources.get(one) for one in jaxpr.outvars]


def digest(closed: Any) -> int:
    """Return a number that is the same in all processes that have traced the same program, and else very likely not."""
    text = _ADDRESSES.sub("", str(closed.jaxpr))
    text = _SETS.sub(lambda found: ",".join(sorted(found[1].split(", "))), text)  # their order depends on the process
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class Names:
    """Numbers for variables in the order in which they are first met, and their types: the same for equal jaxprs."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def __call__(self, atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return constant_key(atom.val)
        number = self._numbers.setdefault(atom, len(self._numbers))
        return number, getattr(atom, "aval", None)


def key(equations: Iterable[Any], inputs: Sequence[Any], outputs: Sequence[Any], names: Names | None = None) -> Any:
    """Return a key of what equations compute from inputs, independent of the names of variables.

    Functions and arrays among the parameters are equal only to themselves: keep them alive as long as the key.
    """
    named = Names() if names is None else names
    before = tuple(map(named, inputs))
    each = tuple(
        (equation_key(one), tuple(map(named, one.invars)), tuple(map(named, one.outvars))) for one in equations
    )
    return before, each, tuple(map(named, outputs))


def equation_key(equation: Any) -> Any:
    """Return a key of an equation but for the names of its variables: with the context that ``bind`` enters."""
    params = {name: value for name, value in equation.params.items() if name not in _FOR_DERIVATIVES}
    types = tuple(var.aval for var in (*equation.invars, *equation.outvars))
    return equation.primitive, _value_key(params), repr(equation.ctx), types


def _value_key(value: Any) -> Any:
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):  # one class in newer versions of JAX
        body: Any = getattr(value, "jaxpr", value)
        consts = tuple(map(constant_key, getattr(value, "consts", ())))
        return key(body.eqns, [*body.constvars, *body.invars], body.outvars), consts
    if isinstance(value, dict):
        return tuple((name, _value_key(one)) for name, one in sorted(value.items()))
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_value_key, value))
    if isinstance(value, np.ndarray | jax.Array):
        return constant_key(value)
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return type(value), value


def constant_key(value: Any) -> Any:
    """Return a key of a constant: numbers are equal by value, arrays only to themselves."""
    if np.ndim(value) or isinstance(value, jax.Array):
        return "array", id(value)
    weak = bool(getattr(getattr(value, "aval", None), "weak_type", False))
    return "number", type(value), str(np.asarray(value).dtype), np.asarray(value).tobytes(), weak


def arrays_in(equation: Any) -> Iterator[Any]:
    """Yield the arrays among an equation's parameters: those that functions in it have closed over, for example."""
    for value in equation.params.values():
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, np.ndarray | jax.Array):
                yield one
            elif isinstance(one, core.ClosedJaxpr | core.Jaxpr):
                yield from getattr(one, "consts", ())
                for inner in getattr(one, "jaxpr", one).eqns:
                    yield from arrays_in(inner)


def calls_back(equations: Iterable[Any]) -> bool:
    """Return whether equations have effects or call Python, and so may depend on the worker that compiles them."""
    return any(
        any(type(effect).__name__ != _OF_AN_AXIS for effect in one.effects)
        or one.primitive.name == "wire"
        or "callback" in one.primitive.name
        or any(calls_back(inner.eqns) for inner in core.jaxprs_in_params(one.params))
        for one in equations
    )


def ordered_effects(program: Any) -> set[Any]:
    """Return the effects of a closed jaxpr, or of an equation, that happen in the program's order."""
    return {effect for effect in program.effects if type(effect).__name__.startswith("Ordered")}


class Shared:
    """Compiled functions by their keys, for all threads and objects of the process; the last used are kept."""

    def __init__(self, most: int):
        self._found: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self._most, self._lock = most, threading.Lock()

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key not in self._found:
                self._found[key] = make()
                if len(self._found) > self._most:
                    self._found.popitem(last=False)
            self._found.move_to_end(key)
            return self._found[key]
