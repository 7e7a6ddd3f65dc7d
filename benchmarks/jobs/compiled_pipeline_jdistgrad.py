"""Job of pipelines.py: the stages of ``own_time`` in pipelines_jdistgrad.py, as one compiled program on each rank."""

import pathlib
import sys

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import median, report

import jdistgrad as jd

MICROBATCHES = 8


def loss_of(ranks, me, size):
    """Return a loss whose stages, one on each rank, hand their results on by ``shift``."""

    def loss(params, microbatches):
        def tick(before, microbatch):
            output = ranks.shift(before, wrap=False, edge=microbatch) * params[0]
            return output, jnp.mean(output)

        _, means = jax.lax.scan(tick, jnp.zeros_like(microbatches[0]), microbatches)
        return jnp.where(me == size - 1, jnp.mean(means[size - 1 :]), 0.0)

    return loss


def own_time(me, size, bytes_between, *, check):
    """Return the time of a step for each action of a worker."""
    ranks = jd.collectives.of_this_world(check=check)
    step = jax.jit(jax.value_and_grad(loss_of(ranks, me, size)))
    microbatches = jnp.ones((MICROBATCHES + size - 1, 1, bytes_between // 4))
    params = jnp.ones(4)
    return median(lambda: jax.block_until_ready(step(params, microbatches)), 200, 10) / (2 * MICROBATCHES)


def main():
    me = jd.init()
    found = {}
    for name, number in (("own_4k", 4 << 10), ("own_1m", 1 << 20)):
        for check in (True, False):
            found[f"{name}{'' if check else '_unchecked'}"] = own_time(me.rank, jd.world_size(), number, check=check)
    if me.rank == 0:
        report(**found)
    jd.shutdown()


if __name__ == "__main__":
    main()
