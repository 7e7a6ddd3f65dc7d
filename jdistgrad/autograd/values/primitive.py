"""The one JAX primitive of the wire: it performs an operation.

On concrete operands it runs at once. Batching is left to the operation, and compiled code calls back to the host. JAX
considers the primitive free of side effects: it may drop unused results, and ``jax.checkpoint`` may repeat it.
"""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

from jdistgrad._compat import forgotten_when_gone, shaped, trace_state_clean, varies_over, varying_like
from jdistgrad.autograd.values.holes import shape_of
from jdistgrad.errors import DifferentiationError
from jdistgrad.ffi.lowering import devices_of, lower
from jdistgrad.ffi.sites import in_callers_context, in_words
from jdistgrad.rpc import current
from jdistgrad.wire.arrays import as_numpy
from jdistgrad.wire.message import stands_for_nothing

Shapes = list[jax.ShapeDtypeStruct]
TOKEN_SHAPE = jax.ShapeDtypeStruct((2,), np.uint32)
TAG_SHAPE = jax.ShapeDtypeStruct((4,), np.uint32)


@dataclasses.dataclass
class Started:
    """An operation under way. ``known``: the outputs known before the answer; ``finish`` turns it into the others.

    ``part``: of an answer to several, the places of this one's arrays. ``kept``: what is kept until the answer.
    """

    future: Any
    finish: Callable[[Any], list[Any]]
    known: Sequence[Any] = ()
    part: slice | None = None
    kept: Any = None

    def outputs(self) -> list[Any]:
        return [*self.known, *self.finish(self.future.result())]


# An operation over a batch, the outputs that have no batch dimension, and the operands that must get one.
Batched = tuple["Operation", Sequence[int], Sequence[int]]


class Operation:
    """An action that JAX sees cross the wire.

    An operation has operands and outputs, all of them arrays. It can be started on concrete operands, and it knows the
    shapes of its outputs and its form over a batch. ``title`` names it in errors.
    """

    title: ClassVar[str]
    follows_tag: ClassVar[bool] = False  # whether the first operand is the tag of a recorded call

    # What the staged step needs to know.
    records: Any = False  # whether the first output is such a tag
    pulls: ClassVar[bool] = False  # whether it pulls cotangents through the recording
    waits_for_nothing: Any = False  # whether others may wait for it in a bundle
    reads: ClassVar[bool] = False  # whether it may depend on what other workers hold
    uses_gradients: ClassVar[bool] = False  # whether it may change what other workers hold
    waits_for_order: ClassVar[bool] = False  # whether it may wait for what it only follows
    contributes: Any = False  # whether it adds to the gradient of a reference
    needs_context: Any = False
    state: Any = None  # what identifies the state that it changes, or None

    def __str__(self) -> str:
        return self.title.format(self)

    @property
    def has_references(self) -> bool:
        return True

    def start(self, operands: Sequence[Any]) -> Started:
        raise NotImplementedError

    def evaluated(self, operands: Sequence[Any]) -> list[Any]:
        """Perform the operation, which is new, outside of compiled code, and return its outputs."""
        return run(*operands, operation=self)

    def at_once(self, operands: Sequence[Any]) -> Any:
        """Return what is kept until the answer if another worker can serve the operation without waiting; else None.

        A staged step sends such operations together.
        """
        return None

    def shapes(self, operands: Shapes) -> Shapes:
        raise NotImplementedError

    def needed(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the operands that ``start`` reads in a context: a staged step passes only these."""
        return operands

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        """Return the operation over a batch. ``batched`` tells which operands begin with a batch dimension."""
        raise DifferentiationError(
            f"{self} cannot be batched: a reference is one value, not a batch of values. Call it outside jax.vmap."
        )


def done(outputs: list[Any]) -> Started:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_result(outputs)
    return Started(future, list)


wire_p = Primitive("wire")
wire_p.multiple_results = True

# Marks an integer as having no tangent. JAX 0.10 gives all results of a custom_vjp tangents, integers of dtype float0.
# A scan that is differentiated again adds these tangents, which JAX refuses.
untied_p = Primitive("untied")


# The operation being evaluated. One that JAX performs at another time is an equation, of a jaxpr that JAX may keep.
_new: contextvars.ContextVar[Operation | None] = contextvars.ContextVar("jdistgrad_new", default=None)


def evaluate(operation: Operation, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Return an operation's outputs: perform it now, or bind it where JAX traces, which may perform it now, too."""
    if trace_state_clean() and not any(isinstance(one, jax.core.Tracer) for one in operands):
        return tuple(operation.evaluated(operands))
    token = _new.set(operation)
    try:
        return tuple(bind(operation, operands))
    finally:
        _new.reset(token)


def bind(operation: Operation, operands: Sequence[Any]) -> list[Any]:
    forgotten_when_gone(type(operation))
    found: list[Any] = wire_p.bind(*of_each_device(operation, operands), operation=operation)
    return found


def of_each_device(operation: Operation | None, operands: Sequence[Any]) -> Sequence[Any]:
    """Return operands in ``jax.shard_map`` as each device's own, if one of them is: each makes a call of its own then.

    So their cotangents are summed over the devices, as JAX does where its own operations meet such operands. If all
    are the same on all devices, each device gets the whole cotangent. The owner of a reference would add it up once for
    each: where there are references, all operands are each device's own. (An ``operation`` of None has some.)
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return operands
    varying = [varies_over(jax.typeof(one)) for one in operands]
    every = frozenset(axes) if operation is None or operation.has_references else frozenset[Any]().union(*varying)
    return [
        jax.lax.pcast(one, tuple(every - mine), to="varying") if every - mine else one
        for one, mine in zip(operands, varying, strict=True)
    ]


def _performed(*operands: Any, operation: Operation) -> list[Any]:
    return operation.evaluated(operands) if _new.get() is operation else run(*operands, operation=operation)


def run(*operands: Any, operation: Operation) -> list[Any]:
    arrays = [as_array(one) for one in operands]
    return _outputs(operation, arrays, lambda: operation.shapes([shape_of(one) for one in arrays]))


def _outputs(operation: Operation, operands: Sequence[Any], shapes: Callable[[], Sequence[Any]]) -> list[Any]:
    """Perform an operation. If a placeholder stands for its tag, its outputs are zeros."""
    if operation.follows_tag and stands_for_nothing(operands[0]):
        return [np.zeros(one.shape, one.dtype) for one in shapes()]
    return operation.start(operands).outputs()


_compiled = threading.Event()  # set once JAX has compiled code with operations in it


def settle() -> None:
    """Wait for compiled code that may still be making calls. Its errors are raised where its results are used."""
    if _compiled.is_set():
        for array in jax.live_arrays():
            with contextlib.suppress(Exception):
                array.block_until_ready()


def as_array(value: Any) -> Any:
    return value if isinstance(value, jax.Array | np.ndarray | np.generic) else jnp.asarray(value)


def has_wire(jaxpr: Any) -> bool:
    return any(True for _ in operations_in(jaxpr.eqns))


def operations_in(equations: Iterable[Any]) -> Iterator[Any]:
    """Yield the operations of equations, also those in the bodies of loops and branches."""
    for eqn in equations:
        if eqn.primitive is wire_p:
            yield eqn.params["operation"]
        for inner in jaxprs_in_params(eqn.params):
            yield from operations_in(inner.eqns)


def _shapes(*operands: Any, operation: Operation) -> list[Any]:
    shapes = operation.shapes([shape_of(one) for one in operands])
    found = [shaped(one.shape, one.dtype, weak=one.weak_type) for one in shapes]
    like = next((one for one in operands if varies_over(one)), None)
    return found if like is None else [varying_like(like, one) for one in found]


def _batched(operands: Sequence[Any], dims: Sequence[Any], *, operation: Operation) -> tuple[Any, list[Any]]:
    (size,) = {one.shape[dim] for one, dim in zip(operands, dims, strict=True) if dim is not None}
    batch, plain, spread = operation.batched(size, [dim is not None for dim in dims])
    first = list(operands)
    for k, dim in enumerate(dims):
        if dim is not None:
            first[k] = jnp.moveaxis(operands[k], dim, 0)
        elif k in spread:
            first[k] = jnp.broadcast_to(operands[k], (size, *jnp.shape(operands[k])))
    outputs = (evaluate if _new.get() is operation else bind)(batch, first)
    return outputs, [None if k in plain else 0 for k in range(len(outputs))]


def _lowered_for_cpus(context: Any, *operands: Any, operation: Operation) -> Any:
    """Lower to a call that frees XLA's thread while the answer is under way."""
    origin, shapes = _lowering(operation), context.avals_out

    def perform(*operands: np.ndarray) -> list[Any]:
        return _perform(operation, origin, shapes, operands, called_here=in_callers_context())

    return lower(context, operands, context.avals_in, perform, changes=operation.contributes)


def _lowered(context: Any, *operands: Any, operation: Operation) -> Any:
    """Lower for other platforms: JAX copies the operands to the host and the results back."""
    origin, shapes = _lowering(operation), [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in context.avals_out]

    def perform(*operands: Any) -> list[np.ndarray]:
        """Run on a thread of XLA, without JAX, which could deadlock: https://github.com/jax-ml/jax/issues/24255."""
        try:
            found = _perform(operation, origin, shapes, [*map(np.asarray, operands)], called_here=False)
            return [np.asarray(one) for one in found]
        except Exception as error:
            raise DifferentiationError(in_words(error)) from error

    changes = operation.contributes and devices_of(context.module_context.axis_context) == 1  # see ``ffi.lowering``
    call = io_callback if changes else jax.pure_callback
    return mlir.lower_fun(lambda *operands: tuple(call(perform, shapes, *operands)), multiple_results=True)(
        context, *operands
    )


def _lowering(operation: Any) -> Any:
    """Note that JAX compiles an operation; return where the operation is made. Raises for a use of gradients."""
    if operation.uses_gradients:
        raise operation.misplaced()
    _compiled.set()
    return current.origin()


def _perform(
    operation: Operation, origin: Any, shapes: Sequence[Any], operands: Sequence[Any], *, called_here: bool
) -> list[Any]:
    with current.at(origin, called_here=called_here), as_numpy():
        return _outputs(operation, operands, lambda: shapes)


untied_p.def_impl(lambda array: array)
untied_p.def_abstract_eval(lambda array: array)
ad.defjvp(untied_p, None)
batching.defvectorized(untied_p)
mlir.register_lowering(untied_p, lambda _, array: [array])

wire_p.def_impl(_performed)
wire_p.def_abstract_eval(_shapes)
batching.primitive_batchers[wire_p] = _batched
mlir.register_lowering(wire_p, _lowered)
mlir.register_lowering(wire_p, _lowered_for_cpus, platform="cpu")
