"""The type of hooks, the check of their results, and averages as hooks: the plain one, and those in 16 bits."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdistgrad.data_parallel.buckets.bucket import Bucket, divided
from jdistgrad.data_parallel.collectives.base import Collectives
from jdistgrad.errors import HookError


class Hook(NamedTuple):
    """A communication hook, which reduces a bucket.

    ``apply`` runs on every rank for every bucket, in bucket order, and must call the same collectives on all ranks. It
    has to divide by ``bucket.divisor`` itself. It may run inside ``jit``, on traced values. Buckets can be complex; a
    hook never gets sparse buckets.

    On a mesh, JAX may type the state as the same on all ranks and ``bucket.flat`` as this rank's own. So apply
    ``collectives.localize`` to a state before ``lax.cond`` if a branch combines it with the bucket, and use
    ``collectives.gather_same`` for gathered values that the result depends on. Use ``finite_or`` for a state computed
    from gradients, or NaN would stay in it after a skipped step.

    Arguments:
      init: takes a bucket without ``flat`` and ``divisor``; returns the initial state for that bucket, a pytree.
      apply: takes (bucket, state, collectives); returns (flat array of the length and dtype of ``bucket.flat``, new
        state).
      name: the hook's name in messages. Ranks compare hooks by name alone, so the name must contain every setting.

    Example:
      >>> def apply(bucket, state, collectives):
      ...     return collectives.allreduce(jnp.clip(bucket.flat, -1, 1)) / bucket.divisor, state
      >>> clip = Hook(lambda bucket: (), apply, "clip")
    """

    init: Callable[[Bucket], Any]
    apply: Callable[[Bucket, Any, Collectives], tuple[jax.Array, Any]]
    name: str = "hook"


def require_states(hook: Hook, states: Sequence[Any], buckets: Sequence[Bucket]) -> None:
    """Raise HookError if a hook's states belong to other buckets. Where there is no state, it belongs to any."""
    if len(states) != len(buckets) and jax.tree.leaves(states):
        raise HookError(
            f"the hook {hook.name!r} has states for {len(states)} buckets, but these gradients are in {len(buckets)}: "
            "they have other dtypes or shapes than the parameters that init was given. Cast them to the parameters' "
            "dtypes first.",
            hook=hook.name,
        )


def reduce(hook: Hook, bucket: Bucket, state: Any, collectives: Collectives) -> tuple[jax.Array, Any]:
    returned = hook.apply(bucket, state, collectives)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    flat, state = returned if is_pair else (returned, None)
    if is_pair and isinstance(flat, jax.Array) and flat.shape == (bucket.size,) and flat.dtype == bucket.dtype:
        return flat, state
    what = f"an array {flat.dtype}{list(flat.shape)}" if isinstance(flat, jax.Array) else f"{flat!r:.60}"
    raise HookError(
        f"the hook {hook.name!r} returned {what}{'' if is_pair else ' alone'} for bucket {bucket.index}, expected "
        f"(a JAX array {bucket.dtype}[{bucket.size}], the new state). A hook must keep the bucket's shape and dtype: "
        "cast back what it has compressed.",
        bucket=bucket.index,
        hook=hook.name,
    )


def finite_or(new: jax.Array, otherwise: Any = 0) -> jax.Array:
    """Return a hook's new state with ``otherwise`` for NaN and infinity, which would stay after a skipped step."""
    return jnp.where(jnp.isfinite(new), new, otherwise)


def average(predivide_factor: float | None = None) -> Hook:
    """Average: divide by ``bucket.divisor`` and sum.

    Arguments:
      predivide_factor: divide by this factor before the sum, and by the rest of the divisor after it. 1 sums first. A
        factor between 1 and the number of ranks keeps 16-bit gradients from underflow before the sum and from
        overflow in it.
    """
    if predivide_factor is None:
        return Hook(lambda bucket: (), _plain, "average")
    if not predivide_factor > 0:
        raise ValueError(f"hooks.average: predivide_factor must be above zero, not {predivide_factor!r}")

    def apply(bucket: Bucket, state: Any, collectives: Collectives) -> tuple[jax.Array, Any]:
        total = collectives.allreduce(divided(bucket.flat, predivide_factor))
        return divided(total, bucket.divisor / predivide_factor), state

    return Hook(lambda bucket: (), apply, f"average, divided by {predivide_factor:g} before the sum")


def float16() -> Hook:
    """Average in float16: 11 bits of precision, up to 65504. Divides before the cast, so that sums do not overflow."""
    return _casting(jnp.float16)


def bfloat16() -> Hook:
    """Average in bfloat16: 8 bits of precision, the range of float32."""
    return _casting(jnp.bfloat16)


def _casting(dtype: Any) -> Hook:
    def apply(bucket: Bucket, state: Any, collectives: Collectives) -> tuple[jax.Array, Any]:
        if bucket.dtype.itemsize <= 2 or bucket.dtype.kind == "c":
            return _plain(bucket, state, collectives)
        small = (divided(bucket.flat, bucket.divisor)).astype(dtype)
        return collectives.allreduce(small).astype(bucket.dtype), state

    return Hook(lambda bucket: (), apply, jnp.dtype(dtype).name)


def _plain(bucket: Bucket, state: Any, collectives: Collectives) -> tuple[jax.Array, Any]:
    return collectives.allreduce(divided(bucket.flat, bucket.divisor)), state
