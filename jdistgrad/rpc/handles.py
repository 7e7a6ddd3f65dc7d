"""Handles: what JAX sees of a reference, and of the gradient of one, in place of a value.

Both have types of their own in JAX (see ``jax.experimental.hijax``); that of gradients is the type of the tangents
and cotangents of both. JAX carries handles through its transformations and adds up gradients, but refuses to compute
with them. Inside is a vector, the *marks*: zeros in a reference, in a gradient the sum of the marks of its parts.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.hijax import HiPspec, HiType, register_hitype
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jdistgrad._compat import complete_high_types, shaped
from jdistgrad.corrections import COMPARISONS, OPERATORS
from jdistgrad.errors import DifferentiationError

NO_MARKS = np.zeros(5, np.float32)  # a mark: the number of contributions, and four numbers that identify them

WHY = (
    "this is the leaf of a reference (an RRef, a RemoteModule, or a gradient of one), not a number: the value is on "
    "its owner. jd.tree_map(f, reference) computes with it there, jd.on(owner, f)(reference) calls a "
    "function with it, jd.get(reference) fetches a copy, and jd.on_owners(tx) applies optax. "
    "(jax.vmap takes a reference with in_axes=None; functions in scan, map and solvers close over it. Gradients of one "
    "reference add up by +.)"
)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(WHY)


class _Explained(type):
    """The type of ``Handle``, which libraries name in their errors about arguments that are no arrays."""

    def __repr__(cls) -> str:
        return f"<{WHY}>"


class Handle(metaclass=_Explained):
    """The handle of a reference, whose marks are known."""

    __slots__ = ("marks",)
    __hash__ = object.__hash__

    def __init__(self, marks: Any):
        self.marks = marks

    def __repr__(self) -> str:
        return "<leaf of a reference>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no attribute {name!r}: {WHY}", name=name, obj=self)


class GradientHandle(Handle):
    """The gradient of a reference, whose marks are known."""


@dataclasses.dataclass(frozen=True, repr=False)
class HandleType(HiType):
    """The type of the handles of references."""

    dtype = np.dtype([("reference", NO_MARKS.dtype, NO_MARKS.shape)])  # jax.lax.stop_gradient looks at it
    handle = Handle
    lanes: tuple[int, ...] = ()  # the sizes of batch dimensions

    def __repr__(self) -> str:
        return "reference"

    def __str__(self) -> str:  # JAX's errors have it where a primitive is given a handle
        return f"{self!r}: {WHY}"

    def str_short(self, *_: Any, **__: Any) -> str:
        return repr(self)

    @property
    def mat(self) -> Any:
        return self.lo_ty()[0].mat

    @property
    def sharding(self) -> NoReturn:
        raise AttributeError(WHY)

    def lo_ty(self) -> list[Any]:
        return [shaped((*self.lanes, *NO_MARKS.shape), NO_MARKS.dtype)]

    def lower_val(self, hi_val: Handle) -> list[Any]:
        return [hi_val.marks]

    def raise_val(self, *lo_vals: Any) -> Handle:
        return self.handle(*lo_vals)

    def to_tangent_aval(self) -> "GradientType":
        return GradientType(self.lanes)

    def dec_rank(self, size: Any, spec: Any) -> "HandleType":
        return self if spec is None else _refuse()

    inc_rank = dec_rank
    leading_axis_spec = _refuse

    def shard(self, *_: Any, **__: Any) -> "HandleType":
        return self

    unshard = shard

    def nospec(self, *_: Any) -> "_Everywhere":
        return _Everywhere()


@dataclasses.dataclass(frozen=True, repr=False)
class GradientType(HandleType):
    """The type of gradients of references. In ``jax.vmap`` there may be one for each element of a batch."""

    handle = GradientHandle

    def __repr__(self) -> str:
        return f"gradient of a reference{[*self.lanes] if self.lanes else ''}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lanes or _refuse()

    def vspace_zero(self) -> Any:
        return gradient_with_marks(jnp.zeros((*self.lanes, *NO_MARKS.shape), NO_MARKS.dtype))

    def vspace_add(self, x: Any, y: Any) -> Any:
        return gradient_with_marks(marks_of(x) + marks_of(y))

    def dec_rank(self, size: Any, spec: Any) -> "GradientType":
        return self if spec is None else GradientType((*self.lanes[:spec], *self.lanes[spec + 1 :]))

    def inc_rank(self, size: Any, spec: Any) -> "GradientType":
        return self if spec is None else GradientType((*self.lanes[:spec], size, *self.lanes[spec:]))

    def leading_axis_spec(self) -> Any:
        return 0


class _Everywhere(HiPspec):
    """How ``jax.shard_map`` places handles that a function has closed over."""

    def to_lo(self) -> tuple[Any, ...]:
        return (jax.sharding.PartitionSpec(),)

    @property
    def partitions(self) -> NoReturn:  # JAX asks for it where it would add up a gradient that has no type for that
        raise DifferentiationError(
            "the gradient of a reference does not come out of jax.shard_map(..., check_vma=False). Leave check_vma out."
        )

    def to_tangent_spec(self) -> "_Everywhere":
        return self

    to_ct_spec = to_tangent_spec


HANDLE = Handle(NO_MARKS)

register_hitype(Handle, lambda _: HandleType())
register_hitype(GradientHandle, lambda one: GradientType(jnp.shape(one.marks)[: -NO_MARKS.ndim]))

# What arrays have and do: JAX asks the types of traced handles for it.
for _name in {"__jax_array__", *(name for name in dir(jax.Array) if name[0] != "_")} - {"aval", "weak_type"}:
    if not hasattr(HandleType, _name) and _name != "sharding":
        setattr(HandleType, _name, property(_refuse))
setattr(Handle, "__jax_array__", property(_refuse))  # noqa: B010 an error of it is passed on, and one of __array__
UNARY = "neg", "pos", "abs", "getitem", "len", "iter", "bool", "int", "float", "complex", "index"
for _name in (*OPERATORS, *(f"r{name}" for name in OPERATORS), *COMPARISONS, "eq", "ne", *UNARY):
    setattr(HandleType, f"_{_name}", staticmethod(_refuse))
    setattr(Handle, f"__{_name}__", _refuse)
for _name in ("__array__", "__array_ufunc__"):
    setattr(Handle, _name, _refuse)


def _sum(one: Any, other: Any) -> Any:
    """Add the gradients of several passes. A contribution counts once: no gradient adds up with itself."""
    if not is_gradient(other) or other is one:
        _refuse()
    return gradient_with_marks(marks_of(one) + marks_of(other))


setattr(GradientType, "_add", staticmethod(_sum))  # noqa: B010
setattr(GradientHandle, "__add__", _sum)  # noqa: B010


def is_handle(leaf: Any) -> bool:
    return isinstance(leaf, Handle) or (isinstance(leaf, jax.core.Tracer) and isinstance(leaf.aval, HandleType))


def is_gradient(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return isinstance(leaf.aval, GradientType)
    return isinstance(leaf, GradientHandle)


def marks_of(handle: Any) -> Any:
    return _marks_p.bind(handle) if isinstance(handle, jax.core.Tracer) else handle.marks


def with_marks(marks: Any, kind: type[Handle] = Handle) -> Any:
    """Return the handle of a reference, or of a gradient, with these marks, which JAX may be tracing."""
    if isinstance(marks, jax.core.Tracer):
        return (_gradient_p if kind is GradientHandle else _reference_p).bind(marks)
    return kind(marks)


gradient_with_marks = functools.partial(with_marks, kind=GradientHandle)


def without_handles(leaves: Sequence[Any]) -> list[Any]:
    """Return leaves with marks in place of handles, as programs without the types of handles take them."""
    return [leaf.marks if isinstance(leaf, Handle) else leaf for leaf in leaves]


def renewed(leaf: Any) -> Any:
    """Return a handle that JAX traces as a new variable, for which it computes nothing; any other leaf as it is.

    ``jax.lax.cond`` takes what a branch returns unchanged for an array (JAX 0.10 to 0.12).
    """
    if not is_handle(leaf) or isinstance(leaf, Handle):
        return leaf
    return with_marks(marks_of(leaf), jax.typeof(leaf).handle)


class _Conversion(Primitive):
    """A primitive between handles and their marks: compiled programs have only the marks.

    Arguments:
      tangent: converts a tangent, ``transpose`` a cotangent.
    """

    def __init__(self, name: str, convert: Any, to_type: Any, tangent: Any, transpose: Any):
        super().__init__(name)
        self.to_lojax: Any = convert
        self.def_impl(convert)
        self.def_abstract_eval(to_type)
        ad.defjvp(self, lambda moved, _: tangent(moved))
        ad.primitive_transposes[self] = lambda cotangent, _: [transpose(cotangent)]
        batching.primitive_batchers[self] = lambda operands, dims: (self.bind(*operands), dims[0])

    def is_high(self, *_: Any, **__: Any) -> bool:
        return True


_marks_p = _Conversion(
    "marks_of_reference",
    lambda handle: jnp.asarray(handle.marks),
    lambda kind: kind.lo_ty()[0],
    marks_of,
    gradient_with_marks,
)
_reference_p = _Conversion("reference", Handle, lambda _: HandleType(), gradient_with_marks, marks_of)
_gradient_p = _Conversion(
    "gradient_of_reference",
    GradientHandle,
    lambda marks: GradientType(marks.shape[: -NO_MARKS.ndim]),
    gradient_with_marks,
    marks_of,
)
complete_high_types(marks_of, lambda kind, marks: with_marks(marks, kind.handle))
