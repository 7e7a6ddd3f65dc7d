"""Job of data_parallel.py: two ranks, with one thread each, measure sharded optimizer state, and collectives alone."""

import os

os.environ["NPROC"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from jobs.data_parallel_jdistgrad import mlp
from measure import few, in_turn, report

import jdistgrad as jd


def collectives():
    """Measure collectives on 64 MiB, beside MPI's allreduce in place."""
    everybody, memory = jd.collectives.MPI(), np.ones(few(16 << 20, 1 << 10), np.float32)
    array = jnp.asarray(memory)
    runs = {
        "in_place": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, memory),
        "allreduce": lambda: everybody.allreduce(array).block_until_ready(),
        "reduce_scatter": lambda: everybody.reduce_scatter(array).block_until_ready(),
    }
    return dict(zip(runs, in_turn(list(runs.values()), 12, MPI.COMM_WORLD.Barrier), strict=True))


def main():
    me = jd.init()
    loss, params, x = mlp(4, 2048)
    gradient = jax.jit(jax.grad(loss))
    ways = {
        "unsharded": optax.chain(jd.average_gradients(), optax.adam(1e-3)),
        "sharded": jd.shard_state(optax.adam(1e-3), average=True),
        "sharded_averages": optax.chain(jd.average_gradients(), jd.shard_state(optax.adam(1e-3))),
    }

    def step(tx):
        state = [tx.init(params)]

        def run():
            updates, state[0] = tx.update(gradient(params, x), state[0], params)
            jax.block_until_ready((updates, state[0]))

        return run

    found = in_turn([step(tx) for tx in ways.values()], 12, MPI.COMM_WORLD.Barrier)
    large = collectives()
    if me.rank == 0:
        report(**dict(zip(ways, found, strict=True)), **large)
    jd.shutdown()


if __name__ == "__main__":
    main()
