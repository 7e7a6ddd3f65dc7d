"""The derivative rules of the operations, for JAX.

The derivative of a call records the call where it runs, and pushes tangents through the recording. For reverse mode JAX
transposes the push, to a pull of the recorded pullback. All are differentiable themselves: a recorded call has the
derivative of ``jax.vjp(f, x)[0]`` (see ``callee/derivatives``); a pull and a push are calls of functions
(``PullbackOf``, ``PushforwardOf``). So derivatives of any order, forward and reverse, are exact. Operations on
references have pullbacks only.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.interpreters import ad

from jdistgrad.autograd.operations.calls import Call, DrawNumber, Linear, Pull, Push
from jdistgrad.autograd.operations.owned_values import Fetch, Publish, Put, Take
from jdistgrad.autograd.tape.ledger import CONTRIBUTION, REFERENCE, TAKEN
from jdistgrad.autograd.values.holes import is_differentiable
from jdistgrad.autograd.values.primitive import Operation, Shapes, as_array, evaluate, of_each_device, untied_p, wire_p
from jdistgrad.errors import DifferentiationError


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """What a backward pass knows of an operation's operands: their shapes, and the numbers of the perturbed ones."""

    shapes: Shapes
    perturbed: tuple[int, ...]


def with_pullback(operation: Operation, token_of: Callable[..., Any], backward: Callable[..., Any], again: Any) -> Any:
    """Return an operation as a function of its operands that has a pullback.

    Arguments:
      token_of: what gives the token for the backward pass, of the operands and the outputs.
      backward: called with this token, what is known of the operands, and the cotangents.
      again: what returns the function to call where a derivative is taken.
    """

    def record(*operands: Any) -> Any:
        values = [as_array(one.value) for one in operands]  # under jvp JAX 0.10 passes users' Python floats
        perturbed = tuple(k for k, one in enumerate(operands) if one.perturbed and is_differentiable(values[k]))
        outputs, shapes = again()(*values), [jax.ShapeDtypeStruct(jnp.shape(one), one.dtype) for one in values]
        return outputs, (token_of(values, outputs), Given(shapes, perturbed))

    rule = jax.custom_vjp(lambda *operands: evaluate(operation, operands))
    rule.defvjp(record, lambda residuals, cotangents: backward(*residuals, cotangents), symbolic_zeros=True)

    def apply(*operands: Any) -> Any:
        try:
            found = rule(*of_each_device(None, operands))
            loose = [isinstance(one, jax.core.Tracer) and not is_differentiable(one) for one in found]
            return tuple(untied_p.bind(one) if cut else one for one, cut in zip(found, loose, strict=True))
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise DifferentiationError(
                "a reference has no forward-mode derivative (jvp, jacfwd, linearize, hessian). Use reverse mode: "
                "jax.vjp, jax.grad, jax.jacrev, and jax.jacrev(jax.jacrev(f)) for a Hessian, or pass values."
            ) from error

    return apply


def with_tangents(operation: Call | Linear) -> Callable[..., tuple[Any, ...]]:
    """Return an operation as a function of its operands that has a derivative along tangents, for forward mode.

    This derivative is a push of the tangents, which JAX transposes for reverse mode.
    """
    rule = jax.custom_jvp(lambda *operands: evaluate(operation, operands))

    def derivative(operands: Sequence[Any], tangents: Sequence[Any]) -> Any:
        given = {k: as_array(one) for k, one in enumerate(tangents) if not isinstance(one, SymbolicZero)}
        outputs, found = _pushed_through(operation, list(map(as_array, operands)), given)
        zeros = [zero_from_primal(one, symbolic_zeros=True) for one in outputs]
        return tuple(outputs), tuple(found.get(k, zero) for k, zero in enumerate(zeros))

    rule.defjvp(derivative, symbolic_zeros=True)

    def apply(*operands: Any) -> tuple[Any, ...]:
        if not any(isinstance(one, jax.core.Tracer) for one in operands):
            return evaluate(operation, operands)
        found: tuple[Any, ...] = rule(*of_each_device(operation, operands))
        return found

    return apply


def _pushed_through(
    operation: Call | Linear, operands: Sequence[Any], tangents: Mapping[int, Any]
) -> tuple[Sequence[Any], dict[int, Any]]:
    """Return an operation's outputs, and the tangents of those that have derivatives, by number."""
    perturbed = [k for k in tangents if is_differentiable(operands[k])]
    if _is_linear(operation, perturbed, operands):
        # JAX must see that the derivative does not depend on the perturbed operands, which are inputs, as in implicit
        # differentiation (custom_root), where the place to differentiate at is an unknown.
        function, first = with_tangents(operation), len(operands) - operation.inputs
        parts = [tangents.get(first + k, jnp.zeros_like(one)) for k, one in enumerate(operands[first:])]
        return function(*operands), dict(enumerate(function(*operands[:first], *parts)))
    given = operands
    if isinstance(operation, Call):
        recording = operation.recording(perturbed)
    elif isinstance(operation, Pull):
        tag, *rest = operands
        (number,) = evaluate(DrawNumber(), jax.lax.stop_gradient(rest[len(rest) - operation.inputs :]))
        recording, given = operation.functional().recording([k + 1 for k in perturbed]), (tag, number, *rest)
    else:
        recording = operation.functional().recording(perturbed)
    outputs = with_tangents(recording)(*given)
    push = Push(recording.released(), recording.orders[-1])
    moved = with_tangents(push)(outputs[0], *given, *(tangents[k] for k in perturbed))
    if not (isinstance(operation, Call) and operation.orders):
        outputs = outputs[1:]  # without the tag
    return outputs, dict(zip((k for k, one in enumerate(outputs) if is_differentiable(one)), moved, strict=True))


def _is_linear(operation: Any, perturbed: Sequence[int], operands: Sequence[Any]) -> TypeGuard[Push]:
    """Return whether an operation is linear in the operands with these numbers.

    A pull need not be: a custom rule may be nonlinear in the cotangents.
    """
    return isinstance(operation, Push) and all(k >= len(operands) - operation.inputs for k in perturbed)


def _derivative(operands: Sequence[Any], tangents: Sequence[Any], *, operation: Any) -> Any:
    """Differentiate an operation that JAX has taken out of its function with a derivative, as in a scan."""
    if operation.uses_gradients:
        raise operation.misplaced()
    given = {k: one for k, one in enumerate(tangents) if not isinstance(one, ad.Zero)}
    if not isinstance(operation, Call | Linear):
        raise DifferentiationError(
            f"no derivative of this order is known for {operation} inside scan, while_loop or cond. Take the inner "
            "derivative outside of the loop, or unroll the loop."
        )
    if isinstance(operation, Linear) and operation.batches and not _is_linear(operation, [*given], operands):
        alone = with_tangents(dataclasses.replace(operation, maps=(), batches=()))  # the function for one element
        return _jvp(operation.over_batches(alone, operation), operands, given)
    if isinstance(operation, Call) and operation.lanes:
        whole = with_tangents(dataclasses.replace(operation, lanes=()))
        return _jvp(lambda *operands: whole(*operation.in_lanes(operands)), operands, given)
    outputs, found = _pushed_through(operation, operands, given)
    zeros = [ad.Zero(zero_from_primal(one, symbolic_zeros=True).aval) for one in outputs]
    return list(outputs), [found.get(k, zero) for k, zero in enumerate(zeros)]


def _jvp(function: Callable[..., Any], operands: Sequence[Any], tangents: Mapping[int, Any]) -> Any:
    """Return a function's outputs and their tangents, along the operands that have tangents."""
    return jax.jvp(
        lambda perturbed: list(function(*(perturbed.get(k, one) for k, one in enumerate(operands)))),
        ({k: operands[k] for k in tangents},),
        (dict(tangents),),
    )


def _transposed(cotangents: Sequence[Any], *operands: Any, operation: Any) -> list[Any]:
    """Transpose a linear operation for JAX: a push to a pull, a pull to a push."""
    if not isinstance(operation, Push | Pull):
        raise DifferentiationError(
            f"{operation} cannot be transposed: whether it is linear is not known here. Use jax.vjp instead of "
            "jax.linear_transpose: the pullback of a linear function, jax.vjp(f, x)[1], is its transpose. Where JAX "
            "transposes a function f by itself (custom_linear_solve, gmres, bicgstab, the rule of a custom_jvp), put "
            "jax.linearize(f, x)[1] in place of f."
        )
    given = operands[: len(operands) - operation.inputs]
    transpose: Pull | Push
    if isinstance(operation, Push):
        live = tuple(k for k, one in enumerate(cotangents) if not isinstance(one, ad.Zero))
        transpose, parts = Pull(operation.call, live), [cotangents[k] for k in live]
    else:
        transpose = Push(operation.call, operation.call.orders[-1])
        parts = list(map(ad.instantiate_zeros, cotangents))
    found = operation.over_batches(with_tangents(transpose), transpose)(*given, *parts)
    if isinstance(operation, Pull):
        found = [found[k] for k in operation.numbers]
    summed = [operation.summed(k, one) for k, one in enumerate(found)]
    return [*(None for _ in given), *map(_placed_like, operands[len(given) :], summed)]


def _placed_like(operand: Any, cotangent: Any) -> Any:
    """Return a cotangent with the explicit sharding of its operand's type, which JAX expects."""
    if not ad.is_undefined_primal(operand):
        return cotangent
    sharding = operand.aval.sharding
    if not any(sharding.spec) or jax.typeof(cotangent).sharding == sharding:
        return cotangent
    return jax.sharding.reshard(cotangent, sharding)


ad.primitive_jvps[wire_p] = _derivative
ad.primitive_transposes[wire_p] = _transposed


def fetch(operation: Fetch, token: Any) -> Callable[..., tuple[Any, ...]]:
    """Return the fetch of a reference's value as a function of its handle, and of its token if it has one."""

    def backward(token: Any, given: Given, cotangents: Any) -> Any:
        return (_put_back(operation.to, REFERENCE, token, cotangents), None)[: len(given.shapes)]

    again = functools.partial(fetch, dataclasses.replace(operation, recorded=True), token)
    return with_pullback(operation, lambda operands, _: [*operands, token][1], backward, again)


def take(operation: Take) -> Callable[..., tuple[Any, ...]]:
    """Return a take of the sum of contributions as a function of the handle and the token."""

    def backward(token: Any, given: Given, cotangents: Any) -> Any:
        return _put_back(operation.to, TAKEN, token, cotangents[1:], operation), None

    return with_pullback(operation, lambda _, outputs: outputs[0], backward, functools.partial(take, operation))


def _put_back(owner: int, kind: str, token: Any, cotangents: Sequence[Any], taken: Take | None = None) -> Any:
    """Contribute the cotangents of a value, or of the leaves ``taken``; return the handle, None if all are zero."""
    candidates = [one for one in cotangents if one is not None and one.dtype != jax.dtypes.float0]
    live = tuple(k for k, one in enumerate(candidates) if not isinstance(one, SymbolicZero))
    if not live:
        return None
    parts = [candidates[k] for k in live]
    numbers, count = (live, len(candidates)) if taken is None else (tuple(taken.wanted[k] for k in live), taken.count)
    return put(Put(owner, kind, numbers, count))(token, *parts)[0]


def publish(operation: Publish, owner: int, token: Any) -> Callable[..., tuple[Any, ...]]:
    """Return the publishing of a value as a function of its arrays."""

    def backward(token: Any, given: Given, cotangents: Any) -> Any:
        places = [k for k, one in enumerate(given.shapes) if is_differentiable(one)]
        numbers = tuple(places.index(k) for k in given.perturbed)
        return _taken(functools.partial(Take, owner, REFERENCE, numbers, len(places)), given, cotangents[0], token)

    again = functools.partial(publish, operation, owner, token)
    return with_pullback(operation, lambda *_: token, backward, again)


def put(operation: Put) -> Callable[..., tuple[Any, ...]]:
    """Return a put as a function of a token and leaves. It returns the handle and the contribution's token."""

    def backward(token: Any, given: Given, cotangents: Any) -> Any:
        numbers = tuple(operation.live[k - 1] for k in given.perturbed)
        wanted = functools.partial(Take, operation.to, CONTRIBUTION, numbers, operation.count)
        return _taken(wanted, given, cotangents[0], token)

    return with_pullback(operation, lambda _, outputs: outputs[1], backward, functools.partial(put, operation))


def _taken(wanted: Callable[..., Take], given: Given, handle: Any, token: Any) -> tuple[Any, ...]:
    """Return the cotangents of operands: for the perturbed ones, the sums of the contributions."""
    found = dict[int, Any]()
    if not isinstance(handle, SymbolicZero):
        _, *sums = take(wanted(tuple(given.shapes[k] for k in given.perturbed)))(handle, token)
        found = dict(zip(given.perturbed, sums, strict=True))
    return tuple(found.get(k) for k in range(len(given.shapes)))
