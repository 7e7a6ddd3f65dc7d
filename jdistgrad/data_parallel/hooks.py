"""Hooks: pairs of pure functions, with a state, that process a bucket instead of averaging it.

Some compress gradients: to low-rank matrices, or to 8 bits. Error feedback adds the compression error to the next step.

``powersgd`` (Vogels et al., "PowerSGD", NeurIPS 2019): each matrix M travels as P (n x r) and Q (m x r), one power
iteration from the last step's Q. The warm start makes the iteration follow the gradients. A matrix is compressed only
if (n + m) * rank * min_rate < n * m; all other leaves are averaged. Weakness: the error is large in the first steps,
so the first ``start`` steps average plainly.

``int8`` (error feedback: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014): a scale for each block.
Guarantee: the sum of what was sent never differs from the sum of the gradients by more than one step's rounding.
Weakness: every rank gathers the bytes of all ranks, so the hook saves nothing beyond about eight ranks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.collectives.base import Collectives
from jdistgrad.collectives.host_arrays import any_traced
from jdistgrad.collectives.operations import divided
from jdistgrad.data_parallel.buckets import Bucket, Slot
from jdistgrad.errors import HookError

__all__ = ["Hook", "average", "bfloat16", "float16", "int8", "powersgd"]

BLOCK = 1024


def __dir__() -> list[str]:
    return __all__


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
    """Raise HookError if a hook's states belong to other buckets. Hooks without state fit any."""
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
        raise ValueError(f"hooks.average: predivide_factor must be positive, not {predivide_factor!r}")

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


# Hooks that compress.


def powersgd(
    *, rank: int = 1, start: int = 1000, min_rate: float = 2.0, error_feedback: bool = True, warm_start: bool = True
) -> Hook:
    """Average matrices by low-rank factors.

    Arguments:
      rank: the rank of the approximation. A higher rank is nearer to the average and sends more bytes.
      start: how many steps are averaged plainly first.
      min_rate: compress a matrix only if that saves more than this factor.
      error_feedback: add the compression error to the next step's gradient.
      warm_start: begin each step's iteration with the last step's Q.
    """
    if rank < 1 or start < 0 or not min_rate > 0:
        raise ValueError(
            f"powersgd: expected rank >= 1, start >= 0 and min_rate > 0; got rank={rank!r}, start={start!r}, "
            f"min_rate={min_rate!r}"
        )

    def init(bucket: Bucket) -> dict[str, Any]:
        factors = {}
        for slot in _matrices(bucket, rank, min_rate):
            width, key = slot.length // slot.shape[0], jax.random.key(slot.index)  # the same on every rank
            factors[str(slot.index)] = jax.random.normal(key, (width, min(rank, slot.shape[0], width)), bucket.dtype)
        return {"step": jnp.zeros((), jnp.int32), "error": jnp.zeros(bucket.size, bucket.dtype), "q": factors}

    def apply(bucket: Bucket, state: dict[str, Any], collectives: Collectives) -> tuple[jax.Array, Any]:
        matrices = _matrices(bucket, rank, min_rate)

        def average(x: jax.Array) -> jax.Array:
            return collectives.allreduce(divided(x, bucket.divisor))

        def plainly(state: dict[str, Any]) -> tuple[jax.Array, Any]:
            return average(bucket.flat), {**state, "step": state["step"] + 1}

        def by_factors(state: dict[str, Any]) -> tuple[jax.Array, Any]:
            return _by_factors(bucket, matrices, state, average, feedback=error_feedback, warm=warm_start)

        if not matrices:
            return plainly(state)
        state = {**state, "error": collectives.localize(state["error"])}
        if any_traced(state):
            return jax.lax.cond(state["step"] < start, plainly, by_factors, state)
        return plainly(state) if state["step"] < start else by_factors(state)

    settings = f"rank={rank}, start={start}, min_rate={min_rate}"
    return Hook(init, apply, f"powersgd({settings}, error_feedback={error_feedback}, warm_start={warm_start})")


def _by_factors(
    bucket: Bucket,
    matrices: list[Slot],
    state: dict[str, Any],
    average: Callable[[jax.Array], jax.Array],
    *,
    feedback: bool,
    warm: bool,
) -> tuple[jax.Array, Any]:
    wanted = bucket.flat + state["error"] if feedback else bucket.flat
    parts = {slot.index: wanted[slot.offset : slot.offset + slot.length] for slot in bucket.slots}
    averaged, sent, factors = dict(parts), dict(parts), {}
    compressed = {slot.index for slot in matrices}
    rest = [slot for slot in bucket.slots if slot.index not in compressed]
    if rest:  # in one reduction
        whole = average(jnp.concatenate([parts[slot.index] for slot in rest]))
        ends = np.cumsum([slot.length for slot in rest])[:-1].tolist()
        averaged.update(zip([slot.index for slot in rest], jnp.split(whole, ends), strict=True))
    for slot in matrices:
        matrix = parts[slot.index].reshape(slot.shape[0], -1)
        left = average(matrix @ state["q"][str(slot.index)])
        left = jnp.linalg.qr(left.astype(jnp.float32))[0].astype(left.dtype)
        mine = matrix.T @ left
        right = average(mine)
        averaged[slot.index], sent[slot.index] = (left @ right.T).reshape(-1), (left @ mine.T).reshape(-1)
        factors[str(slot.index)] = before = state["q"][str(slot.index)]
        if warm:  # not from columns of zeros: the iteration could not leave them
            factors[str(slot.index)] = jnp.where(right.any(axis=0), finite_or(right, otherwise=before), before)
    found, used = (
        jnp.concatenate([each[slot.index] for slot in bucket.slots]).astype(bucket.dtype) for each in (averaged, sent)
    )
    error = finite_or(wanted - used) if feedback else state["error"]
    return found, {"step": state["step"] + 1, "error": error, "q": factors}


def _matrices(bucket: Bucket, rank: int, min_rate: float) -> list[Slot]:
    found = []
    for slot in bucket.slots:
        if bucket.dtype.kind != "c" and len(slot.shape) > 1 and slot.length:
            n, m = slot.shape[0], slot.length // slot.shape[0]
            found += [slot] if (n + m) * rank * min_rate < n * m else []
    return found


def int8(*, block: int = BLOCK) -> Hook:
    """Average in 8 bits, with error feedback. The state is the rounding error: an array as large as the bucket."""
    if block < 1:
        raise ValueError(f"int8: a block has at least one element, not {block!r}")

    def apply(bucket: Bucket, error: jax.Array, collectives: Collectives) -> tuple[jax.Array, jax.Array]:
        if bucket.dtype.kind == "c":
            return _plain(bucket, error, collectives)
        small, scales, error = _quantize(divided(bucket.flat, bucket.divisor) + error, block)
        total = _total(collectives.gather_same(small), collectives.gather_same(scales), bucket.size)
        return total.astype(bucket.dtype), error

    return Hook(lambda bucket: jnp.zeros(bucket.size, bucket.dtype), apply, f"int8(block={block})")


@functools.partial(jax.jit, static_argnums=1)
def _quantize(wanted: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    blocks = jnp.pad(wanted, (0, -wanted.size % block)).reshape(-1, block).astype(jnp.float32)
    scales = jnp.max(jnp.abs(blocks), axis=1, keepdims=True, initial=0) / 127
    small = jnp.round(blocks / jnp.where(scales == 0, 1, scales)).astype(jnp.int8)
    sent = (small.astype(scales.dtype) * scales).reshape(-1)[: wanted.size]
    return small, scales, finite_or(wanted - sent.astype(wanted.dtype))


@functools.partial(jax.jit, static_argnums=2)
def _total(small: Any, scales: Any, size: int) -> jax.Array:
    return jnp.sum(small.astype(jnp.float32) * scales, axis=0).reshape(-1)[:size]
