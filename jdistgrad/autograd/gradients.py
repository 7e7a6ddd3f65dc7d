"""Gradients of functions that call other workers: ``grad``, ``value_and_grad``, ``backward``."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd.callee.contributions import gradient_of
from jdistgrad.autograd.contexts import Context, find_context, some_context
from jdistgrad.autograd.values.holes import has_gradient, is_array, split
from jdistgrad.corrections import Elsewhere
from jdistgrad.errors import ContextError, DifferentiationError, EncodingError
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.handles import HANDLE, NO_MARKS, marks_of, renewed
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.scopes import Scope
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.message import spell

P = ParamSpec("P")
V = TypeVar("V")
A = TypeVar("A")


class RemoteGradient(Elsewhere):
    """The gradient of a reference's value. It stays with the value, on its owner; ``to_here`` fetches a copy.

    To JAX a RemoteGradient is a pytree with one leaf, as a reference is.
    """

    def __init__(self, rref: RRef[Any], handle: Any, scope: Scope | None, lease: Any = None):
        self.rref, self.handle = rref, handle
        self.scope, self.lease = scope, lease

    @property
    def marks(self) -> Any:
        """Return the sum of the marks of the contributions."""
        return marks_of(self.handle)

    @property
    def owner(self) -> WorkerInfo:
        return self.rref.owner

    def to_here(self, timeout: float | None = None) -> Any:
        """Fetch the gradient, in the structure of the value, with None in place of leaves that are not float arrays.

        It is that of one backward pass, and of one place if the reference was an argument at several. The context,
        ``get_gradients`` and ``DistributedOptimizer.step(ctx)`` have the sum.

        Raises:
          DifferentiationError: JAX traces the gradient (grad, vmap, jit ...): its parts come later, or are of a batch.
            Or it was scaled or clipped, which has no effect on what is on the owner.
        """
        with within(self.checked_scope()):
            return current_worker().rpc_sync(self.owner, gradient_of, self.identified(), {}, timeout)

    def identified(self) -> tuple[int, str, Any]:
        """Return the arguments with which the owner finds the gradient: see ``gradient_of``."""
        marks = tuple(np.asarray(self.marks).tolist()) if jnp.shape(self.marks) == NO_MARKS.shape else None
        return self.rref.id, str(self.rref), marks

    def checked_scope(self) -> Scope:
        """Return the scope to fetch the gradient in. Raises if it cannot be fetched here and now."""
        if self.scope is None:
            raise ContextError(
                f"the {self} belongs to no context: the gradient was made outside `with jdistgrad.context()`, or in a "
                "staged function. Make the gradient inside a context; from a staged function, return it and fetch it."
            )
        if not trace_state_clean():
            raise DifferentiationError(
                f"the {self} was fetched inside a function that JAX traces (grad, vmap, jax.jit, jd.jit, scan ...), "
                "where it would be zero, a sum over the batch, or without a derivative. Return the gradient from the "
                "function and fetch it outside, or differentiate a copy of the value, rref.to_here()."
            )
        current_worker().scopes.find(self.scope.id)
        return self.scope

    def __reduce__(self) -> Any:
        raise EncodingError(
            f"the {self} stays on its owner and cannot be sent. Send a copy, gradient.to_here(), or use the gradient "
            "on the owner: jd.DistributedOptimizer, or jd.get_gradients(ctx) in a function that runs there."
        )

    def __repr__(self) -> str:
        return f"gradient of {self.rref}"


jax.tree_util.register_pytree_node(
    RemoteGradient,
    lambda gradient: ((gradient.handle,), jax.tree.structure(gradient.rref)),
    lambda reference, children: RemoteGradient(
        jax.tree.unflatten(reference, (HANDLE,)), renewed(children[0]), current_scope()
    ),
)


@overload
def value_and_grad(
    fun: Callable[P, tuple[V, A]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[tuple[V, A], Any]]: ...


@overload
def value_and_grad(
    fun: Callable[P, V],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,  # noqa: FBT002 as in jax.value_and_grad
    holomorphic: bool = False,  # noqa: FBT001, FBT002
    allow_int: bool = False,  # noqa: FBT001, FBT002
) -> Callable[P, tuple[V, Any]]: ...


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 as in jax.value_and_grad
    holomorphic: bool = False,  # noqa: FBT001, FBT002
    allow_int: bool = False,  # noqa: FBT001, FBT002
) -> Callable[..., Any]:
    """Return a function like that of ``jax.value_and_grad``, for functions that call other workers.

    An RRef may be differentiated like any other argument: its gradient stays on its owner, in the context, and the
    function returns a ``RemoteGradient`` for the RRef. Outside any context, the function opens a context of its own,
    which closes when the last RemoteGradient made in it is gone.

    Arguments:
      fun: a function of arrays, pytrees and RRefs that returns a scalar, or with ``has_aux`` a pair: a scalar and
        auxiliary data of any kind.
      argnums: which arguments to differentiate.
      has_aux: whether ``fun`` returns such a pair.
      holomorphic, allow_int: as for ``jax.value_and_grad``.

    Raises:
      DifferentiationError: ``fun`` returned a reference, or something that is not a float scalar.

    Example:
      >>> with jd.context() as ctx:
      ...     loss, (enc_grad, head_grad) = jd.value_and_grad(loss_fn, argnums=(0, 1))(enc, head)
    """
    _require_function(fun, "grad and value_and_grad take the function that computes the loss: grad(loss_fn)(params)")

    @functools.wraps(fun)
    def rooted(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        if holomorphic:
            return result  # JAX requires a complex scalar
        if has_aux and isinstance(result, tuple) and len(result) == 2:
            return _scalar(result[0]), result[1]
        return result if has_aux else _scalar(result)  # JAX refuses what is no pair

    transformed = jax.value_and_grad(rooted, argnums, has_aux, holomorphic, allow_int)

    @functools.wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        with some_context() as lease:
            value, gradients = transformed(*args, **kwargs)
            return value, _with_remote(gradients, lease)

    return differentiated


@overload
def grad(
    fun: Callable[P, tuple[Any, A]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[Any, A]]: ...


@overload
def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,  # noqa: FBT002 as in jax.grad
    holomorphic: bool = False,  # noqa: FBT001, FBT002
    allow_int: bool = False,  # noqa: FBT001, FBT002
) -> Callable[P, Any]: ...


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 as in jax.grad
    holomorphic: bool = False,  # noqa: FBT001, FBT002
    allow_int: bool = False,  # noqa: FBT001, FBT002
) -> Callable[..., Any]:
    """Return a function like that of ``jax.grad``, for functions that call other workers. See ``value_and_grad``.

    Example:
      >>> gradient = jd.grad(loss_fn)(params)
    """
    both: Callable[..., Any] = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)  # type: ignore[call-overload]

    @functools.wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return differentiated


def backward(ctx: Context | int, loss_fn: Callable[..., V], *args: Any) -> tuple[V, tuple[Any, ...]]:
    """Run a function, differentiate what it returns, and collect the gradients in a context.

    Arguments:
      ctx: an open context of this worker.
      loss_fn: a function that returns a scalar, or a list or tuple of scalars (the roots; their sum is differentiated).
      args: the arguments of ``loss_fn``. Every reference and every float array in them is differentiated.

    Returns:
      The result of ``loss_fn``, and the gradient of each argument, with RemoteGradients in place of references, and
      None in place of what is not differentiated. In the context, gradients of references add up over several calls.

    Raises:
      ContextError: the context is closed, not known here, or this thread is in another context.
      DifferentiationError: there is nothing to differentiate, or a root is not a local float scalar.

    Example:
      >>> with jd.context() as ctx:
      ...     loss, (enc_grad, head_grad) = jd.backward(ctx, loss_fn, enc, head)
      ...     jd.get_gradients(ctx)
    """
    _require_function(
        loss_fn, "backward takes the function that computes the loss, and its arguments: backward(ctx, loss_fn, params)"
    )
    found = find_context(ctx)
    outer = current_scope()
    if outer is not None and outer is not found.scope:
        raise ContextError(f"backward in {found}: this thread is in context {spell(outer.id)}", context=found.id)
    layout, operands = split(args, lambda leaf: has_gradient(leaf) or isinstance(leaf, float | complex))
    if not operands:
        raise DifferentiationError("backward: none of the arguments has a reference or a float array to differentiate")

    def roots(operands: Sequence[Any]) -> tuple[Any, Any]:
        value = loss_fn(*layout.fill(operands))
        several = value if isinstance(value, list | tuple) else [value]
        if not several:
            raise DifferentiationError("backward: the function returned no roots")
        return sum(_scalar(root) for root in several), value

    with within(found.scope):
        (_, value), gradients = jax.value_and_grad(roots, has_aux=True)(operands)
        return value, _with_remote(layout.only_holes().fill(gradients), None)


def _require_function(fun: Any, usage: str) -> None:
    if not callable(fun):
        raise TypeError(
            f"{usage}. JAX differentiates functions; this {type(fun).__name__} has no record of its computation."
        )


def _scalar(root: Any) -> Any:
    """Return a root. Raises DifferentiationError if it is not a local, real float scalar."""
    if isinstance(root, RRef):
        raise DifferentiationError(
            f"a function to differentiate must return a local scalar, not {root}. Return rref.to_here().", root=root
        )
    is_number = is_array(root) or isinstance(root, int | float | complex)
    if not is_number or jnp.shape(root) != () or not jnp.issubdtype(jnp.result_type(root), jnp.floating):
        what = f"{root.dtype}{list(root.shape)}" if is_array(root) else f"a {type(root).__name__}"
        raise DifferentiationError(
            f"a function to differentiate must return a real float scalar, not {what}. Return the sum or mean of an "
            "array, the real part or absolute value of a complex number; or use jax.vjp."
        )
    return root


def _with_remote(gradients: Any, lease: Any) -> Any:
    """Wrap references among gradients as RemoteGradients: JAX returns them with the gradient's handle."""

    def convert(leaf: Any) -> Any:
        return RemoteGradient(leaf, leaf.handle, current_scope(), lease) if isinstance(leaf, RRef) else leaf

    return jax.tree.map(convert, gradients, is_leaf=lambda leaf: isinstance(leaf, RRef))


def hold(results: Any, lease: Any) -> Any:
    """Let RemoteGradients among the results keep their context open."""
    if lease is not None:
        for leaf in jax.tree.leaves(results, is_leaf=lambda leaf: isinstance(leaf, RemoteGradient)):
            if isinstance(leaf, RemoteGradient):
                leaf.lease = lease
    return results
