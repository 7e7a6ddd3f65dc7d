"""Batch normalization over the batch of all ranks.

Each rank adds its count, sum and sum of squared deviations, so ranks may have different numbers of rows, or none.
The mean and variance are differentiated across ranks: their transposes sum all ranks' cotangents.
"""

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import canonicalize_dtype

from jdistgrad.collectives.base import Collectives, require_collectives


def batch_statistics(
    x: jax.Array, collectives: Collectives, axes: Sequence[int] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the mean and variance over the batch of all ranks. Every rank must call it.

    Arguments:
      x: this rank's batch, features last; it may be empty.
      collectives: the ranks whose batches count.
      axes: the axes to reduce; default all but the last.

    Returns:
      The mean and the (biased) variance of each feature, in float32 or wider. The variance of complex numbers is real,
      as in ``jnp.var``.
    """
    over = tuple(range(x.ndim - 1)) if axes is None else tuple(axis % x.ndim for axis in axes)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    total = wide.sum(over)
    count = jnp.full(total.shape, math.prod(x.shape[axis] for axis in over), wide.dtype)
    count, total = collectives.allreduce(jnp.stack([count, total]))
    count = jnp.maximum(count.real, 1)
    mean = total / count
    shape = [1 if k in over else d for k, d in enumerate(x.shape)]
    apart = wide - mean.reshape(shape)
    squared = jnp.square(apart.real) + jnp.square(apart.imag) if jnp.iscomplexobj(apart) else jnp.square(apart)
    return mean, collectives.allreduce(squared.sum(over)) / count


class SyncBatchNorm(nn.Module):
    """flax's ``BatchNorm``, over the batch of all ranks. Parameters and statistics have the same names and shapes.

    Every rank must apply the layer equally often. Features are the last axis, and there is no ``mask``. Variances are
    computed as for ``use_fast_variance=False``, in float32 or wider; ``use_fast_variance`` and
    ``force_float32_reductions`` are ignored. All other settings are flax's.
    """

    collectives: Collectives
    use_running_average: bool | None = None
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: Any = None
    param_dtype: Any = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: nn.initializers.Initializer = nn.initializers.zeros
    scale_init: nn.initializers.Initializer = nn.initializers.ones
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    def __post_init__(self) -> None:
        require_collectives("SyncBatchNorm", self.collectives)
        super().__post_init__()

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: jax.Array, use_running_average: bool | None = None) -> jax.Array:  # noqa: FBT001 as in flax
        frozen = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
        shape = (x.shape[-1],)
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        scale = self.param("scale", self.scale_init, shape, self.param_dtype) if self.use_scale else None
        bias = self.param("bias", self.bias_init, shape, self.param_dtype) if self.use_bias else None
        if frozen or self.is_initializing():
            m, v = mean.value, var.value
        else:
            m, v = batch_statistics(x, self.collectives)
            mean.value, var.value = moved((mean.value, var.value), (m, v), self.momentum)
        return normalized(x, (m, v), (scale, bias), self.epsilon, self.dtype)


class NnxSyncBatchNorm(nnx.BatchNorm):
    """``flax.nnx.BatchNorm`` over the batch of all ranks, with the same parameters and statistics.

    Every rank must apply the layer equally often. Features are the last axis, and there is no ``mask``.

    Arguments:
      num_features: as in nnx.
      collectives: the ranks whose batches count.
      settings: any other argument of ``nnx.BatchNorm``, except ``axis`` and ``axis_name``; ``use_fast_variance`` is
        ignored.

    Example:
      >>> norm = jd.NnxSyncBatchNorm(64, dp.collectives, rngs=nnx.Rngs(0))
    """

    def __init__(self, num_features: int, collectives: Collectives, *, rngs: nnx.Rngs, **settings: Any):
        refused = sorted({"axis", "axis_name", "axis_index_groups"} & set(settings))
        if refused:
            raise TypeError(
                f"NnxSyncBatchNorm takes no {refused[0]}: features are the last axis. Pass the ranks as collectives."
            )
        require_collectives("NnxSyncBatchNorm", collectives)
        super().__init__(num_features, rngs=rngs, **settings)
        self.collectives = collectives

    def __call__(self, x: jax.Array, use_running_average: bool | None = None) -> jax.Array:  # noqa: FBT001 as in flax
        parameters = [None if one is None else one[...] for one in (self.scale, self.bias)]
        x, m, v, *parameters = self.promote_dtype((x, self.mean[...], self.var[...], *parameters), dtype=self.dtype)
        if not (self.use_running_average if use_running_average is None else use_running_average):
            m, v = batch_statistics(x, self.collectives)
            self.mean[...], self.var[...] = moved((self.mean[...], self.var[...]), (m, v), self.momentum)
        return normalized(x, (m, v), parameters, self.epsilon, self.dtype)


def moved(averages: Sequence[jax.Array], found: Sequence[jax.Array], momentum: float) -> tuple[jax.Array, ...]:
    """Return running averages after a batch. They have no derivative."""
    pairs = zip(averages, map(jax.lax.stop_gradient, found), strict=True)
    return tuple(momentum * old + (1 - momentum) * new for old, new in pairs)


def normalized(x: jax.Array, moments: Any, parameters: Sequence[Any], epsilon: float, dtype: Any) -> jax.Array:
    """Return a normalized batch. Without a ``dtype``, the input and the parameters are promoted, as in flax."""
    shape = (1,) * (x.ndim - 1) + (-1,)  # jax_numpy_rank_promotion may be "raise"
    each: Any = (None if one is None else jnp.reshape(one, shape) for one in (*moments, *parameters))
    mean, variance, scale, bias = each
    factor = jax.lax.rsqrt(variance + epsilon)
    y = (x - mean) * (factor if scale is None else factor * scale)
    return (y if bias is None else y + bias).astype(canonicalize_dtype(x, *parameters, dtype=dtype))
