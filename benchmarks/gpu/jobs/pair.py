"""Job of table.py: two ranks, which may share a GPU, measure calls with device arrays and reductions over MPI."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
from mpi4py import MPI

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
from jobs.data_parallel_jdistgrad import mlp
from measure import in_turn, median, report

import jdistgrad as jd
from jdistgrad.config import settings


def same(x):
    return x


def layer(w, x):
    return jnp.tanh(x @ w)


def calls(large_bytes):
    """Measure round trips, and gradients with an optimizer's step for a parameter of the other rank."""
    small, large = jnp.ones(1), jnp.ones(large_bytes // 4)
    weights = jd.remote(1, jnp.ones, args=((3, 3),))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.05), [weights])
    x = jnp.ones((4, 3))

    @jd.jit
    def note(weights):
        value, gradients = jd.value_and_grad(lambda w: jd.rpc_sync(1, layer, args=(w, x)).sum())(weights)
        optimizer.step(gradients)
        return value

    return {
        "small": median(lambda: jd.rpc_sync(1, same, args=(small,)).block_until_ready(), 200),
        "large": median(lambda: jd.rpc_sync(1, same, args=(large,)).block_until_ready(), 10, 3),
        "large_bytes": large_bytes,
        "note": median(lambda: note(weights), 100),
    }


def reductions(layers, width, batch):
    """Measure a local step, a step with overlapped reductions, the reduction alone, and both inside ``jax.jit``."""
    loss, params, x = mlp(layers, width, batch)
    dp = jd.DataParallel(jd.collectives.MPI(), overlap=True)
    local, step = jax.jit(jax.value_and_grad(loss)), dp.value_and_grad(loss)
    gradients = jax.block_until_ready(local(params, x)[1])
    runs = {
        "local": lambda: local(params, x),
        "step": lambda: step(params, x),
        "reduction": lambda: dp.average(gradients),
        **compiled("compiled", jd.DataParallel(jd.collectives.MPI()), loss, params, x, gradients),
    }
    if settings.collectives == "mpi-on-device":
        on_device = jd.DataParallel(jd.collectives.MPI(on_device=True))
        runs |= compiled("on_device", on_device, loss, params, x, gradients)
    made = [lambda run=run: jax.block_until_ready(run()) for run in runs.values()]
    return dict(zip(runs, in_turn(made, 8, MPI.COMM_WORLD.Barrier), strict=True))


def compiled(name, dp, loss, params, x, gradients):
    step, average = jax.jit(dp.value_and_grad(loss)), jax.jit(dp.average)
    return {f"{name}_step": lambda: step(params, x), f"{name}_reduction": lambda: average(gradients)}


def main():
    me = jd.init()
    large = jax.default_backend() != "cpu"
    found = calls((64 if large else 1) << 20) if me.rank == 0 else {}
    jd.barrier()
    found |= reductions(*(8, 2048, 1 << 16) if large else (3, 64, 16))
    if me.rank == 0:
        report(**found)
    jd.shutdown()


if __name__ == "__main__":
    main()
