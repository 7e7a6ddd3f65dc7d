"""The derivative rules of the operations, for JAX.

The forward rule of a call records the call where it runs, and the backward rule pulls the recorded pullback. Both are
differentiable themselves: a recorded call has the derivative of ``jax.vjp(f, x)[0]`` (see ``callee/orders``), and a
pull is the call of a function (``PullbackOf``). So derivatives of any order are exact.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jdistgrad.autograd.operations.calls import Call
from jdistgrad.autograd.operations.owned_values import Fetch, Publish, Put, Take
from jdistgrad.autograd.operations.pulls import DrawNumber, Pull
from jdistgrad.autograd.tape.ledger import CONTRIBUTION, REFERENCE, TAKEN
from jdistgrad.autograd.values.holes import is_differentiable
from jdistgrad.autograd.values.primitive import evaluate, untied
from jdistgrad.errors import DifferentiationError


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """A residual that is not an array."""

    value: Any


def with_rule(primal: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """Give a function a derivative. ``forward`` gets the numbers of the perturbed operands, and the operands."""

    def record(*operands: Any) -> Any:
        perturbed = tuple(k for k, one in enumerate(operands) if one.perturbed and is_differentiable(one.value))
        return forward(perturbed, *(one.value for one in operands))

    rule = jax.custom_vjp(primal)
    rule.defvjp(record, backward, symbolic_zeros=True)

    def apply(*operands: Any) -> Any:
        try:
            return tuple(one if is_differentiable(one) else untied(one) for one in rule(*operands))
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise DifferentiationError(
                "a remote call has no forward-mode derivative (jvp, jacfwd, linearize, hessian). Use reverse mode: "
                "jax.vjp, jax.grad, jax.jacrev, and jax.jacrev(jax.jacrev(f)) for a Hessian."
            ) from error

    return apply


def call(operation: Call) -> Callable[..., tuple[Any, ...]]:
    """Return a remote call as a function of its operands."""

    def forward(wanted: tuple[int, ...], *operands: Any) -> Any:
        recording = operation.recording(wanted)
        tag, *outputs = recorded(recording)(*operands)
        return tuple(outputs), (Fixed(recording), tag, operands)

    return with_rule(lambda *operands: evaluate(operation, operands), forward, _pull_back)


def recorded(operation: Call) -> Callable[..., tuple[Any, ...]]:
    """Return a recorded call as a function of its operands. It returns a tag and the outputs."""

    def forward(wanted: tuple[int, ...], *operands: Any) -> Any:
        again = operation.recording(wanted)
        outputs = recorded(again)(*operands)
        return outputs, (Fixed(again), outputs[0], operands)

    def backward(residuals: Any, cotangents: Any) -> Any:
        return _pull_back(residuals, cotangents[1:])

    return with_rule(lambda *operands: evaluate(operation, operands), forward, backward)


def _pull_back(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    fixed, tag, operands = residuals
    operation = fixed.value
    live, parts = nonzero(cotangents)
    if not live:
        return (None,) * len(operands)
    found = pulled(Pull(operation, live))(tag, *operands, *parts)
    return scattered(operation.orders[-1], found, len(operands))


def pulled(operation: Pull) -> Callable[..., tuple[Any, ...]]:
    """Return the pull of a recorded call as a function of its tag, its operands and the live cotangents."""
    same = operation.functional()

    def forward(perturbed: tuple[int, ...], tag: Any, *operands: Any) -> Any:
        recording = same.recording([k + 1 for k in perturbed])  # the number comes after the tag
        (number,) = evaluate(DrawNumber(), jax.lax.stop_gradient(operands[len(operands) - len(operation.live) :]))
        given = (tag, number, *operands)
        tag, *outputs = recorded(recording)(*given)
        return tuple(outputs), (Fixed(recording), tag, given)

    def backward(residuals: Any, cotangents: Any) -> Any:
        tag, _, *operands = _pull_back(residuals, cotangents)
        return tag, *operands

    return with_rule(lambda *operands: evaluate(operation, operands), forward, backward)


def fetch(operation: Fetch, owner: int, token: Any) -> Callable[..., tuple[Any, ...]]:
    """Return the fetch of a reference's value as a function of its handle, and of its token if it has one."""

    def forward(perturbed: tuple[int, ...], *operands: Any) -> Any:
        residuals = operands[1] if len(operands) > 1 else token, Fixed(len(operands))
        recorded = dataclasses.replace(operation, recorded=True)
        return fetch(recorded, owner, token)(*operands), residuals

    def backward(residuals: Any, cotangents: Any) -> Any:
        token, count = residuals
        live, parts = nonzero(cotangents)
        total = sum(_has_derivative(one) for one in cotangents)
        if not live:
            return (None, None)[: count.value]
        handle, _ = put(Put(owner, REFERENCE, live, total))(token, *parts)
        return (handle, None)[: count.value]

    return with_rule(lambda *operands: evaluate(operation, operands), forward, backward)


def publish(operation: Publish, owner: int, token: Any) -> Callable[..., tuple[Any, ...]]:
    """Return the publishing of a value as a function of its arrays."""

    def forward(perturbed: tuple[int, ...], *operands: Any) -> Any:
        places = [k for k, one in enumerate(operands) if is_differentiable(one)]
        numbers = tuple(places.index(k) for k in perturbed)
        shapes = tuple(jax.ShapeDtypeStruct(jnp.shape(operands[k]), jnp.result_type(operands[k])) for k in perturbed)
        residuals = Fixed((perturbed, numbers, len(places), shapes, len(operands)))
        return publish(operation, owner, token)(*operands), residuals

    def backward(residuals: Any, cotangents: Any) -> Any:
        perturbed, numbers, total, shapes, count = residuals.value
        if isinstance(cotangents[0], SymbolicZero):
            return (None,) * count
        *found, _ = take(Take(owner, REFERENCE, numbers, total, shapes))(cotangents[0], token)
        return scattered(perturbed, found, count)

    return with_rule(lambda *operands: evaluate(operation, operands), forward, backward)


def put(operation: Put) -> Callable[..., tuple[Any, ...]]:
    """Return a put as a function of a token and leaves. It returns the handle and the contribution's token."""

    def forward(perturbed: tuple[int, ...], *operands: Any) -> Any:
        outputs = put(operation)(*operands)
        numbers = tuple(operation.live[k - 1] for k in perturbed)
        shapes = tuple(jax.ShapeDtypeStruct(operands[k].shape, operands[k].dtype) for k in perturbed)
        return outputs, (Fixed((perturbed, numbers, shapes, len(operands))), outputs[1])

    def backward(residuals: Any, cotangents: Any) -> Any:
        fixed, token = residuals
        perturbed, numbers, shapes, count = fixed.value
        if isinstance(cotangents[0], SymbolicZero):
            return (None,) * count
        *found, _ = take(Take(operation.owner, CONTRIBUTION, numbers, operation.count, shapes))(cotangents[0], token)
        return scattered(perturbed, found, count)

    return with_rule(lambda *operands: evaluate(operation, operands), forward, backward)


def take(operation: Take) -> Callable[..., tuple[Any, ...]]:
    """Return a take of the sum of contributions as a function of the handle and the token."""

    def forward(perturbed: tuple[int, ...], *operands: Any) -> Any:
        outputs = take(operation)(*operands)
        return outputs, outputs[-1]

    def backward(token: Any, cotangents: Any) -> Any:
        live, parts = nonzero(cotangents[:-1])
        if not live:
            return None, None
        numbers = tuple(operation.wanted[k] for k in live)
        handle, _ = put(Put(operation.owner, TAKEN, numbers, operation.count))(token, *parts)
        return handle, None

    return with_rule(lambda *operands: evaluate(operation, operands), forward, backward)


def nonzero(cotangents: Sequence[Any]) -> tuple[tuple[int, ...], list[Any]]:
    """Return the nonzero cotangents, and before them their numbers among the results that have derivatives."""
    candidates = [one for one in cotangents if _has_derivative(one)]
    live = tuple(k for k, one in enumerate(candidates) if not isinstance(one, SymbolicZero))
    return live, [candidates[k] for k in live]


def _has_derivative(cotangent: Any) -> bool:
    return cotangent is not None and cotangent.dtype != jax.dtypes.float0


def scattered(places: Sequence[int], values: Sequence[Any], count: int) -> tuple[Any, ...]:
    found = dict(zip(places, values, strict=True))
    return tuple(found.get(k) for k in range(count))
