"""A loss of two references, whose owners compute with them, and the same training by optax on one worker."""

import jax
import optax

import jdistgrad as jd
from helpers.programs import X, Y, affine, make_params
from helpers.worlds import last


def distributed_loss(first, second, x, y):
    out = jd.rpc_sync(last(), affine, args=(first, x)) + jd.rpc_sync(0, affine, args=(second, x))
    return ((out - y) ** 2).sum()


def serial_loss(first, second, x, y):
    return ((affine(first, x) + affine(second, x) - y) ** 2).sum()


def trained_serially(tx, steps):
    """Return what the values of ``references()`` are after this many steps, step k with X + k."""
    params = (make_params(1), make_params(2))
    state = tx.init(params)
    taking_more = tx if isinstance(tx, optax.MultiSteps) else optax.with_extra_args_support(tx)
    for k in range(steps):
        value, gradients = jax.value_and_grad(serial_loss, argnums=(0, 1))(*params, X + k, Y)
        updates, state = taking_more.update(gradients, state, params, value=value)
        params = optax.apply_updates(params, updates)
    return params


def values(refs):
    return tuple(ref.to_here() for ref in refs)
