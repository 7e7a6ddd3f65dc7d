"""Job of surviving.py: rank 0 measures calls to rank 1, and both measure steps of data parallelism."""

import os

os.environ["NPROC"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from jobs.data_parallel_jdistgrad import mlp
from measure import median, pipelined, report

import jdistgrad as jd

MODELS = {"small": (mlp(8, 64), 1000), "wide": (mlp(4, 1024), 200)}


def echo(x):
    return x


def calls():
    """Return the time of a call, with NumPy's arrays and JAX's, and how many a second answers."""

    def call(array):
        return median(lambda: jd.rpc_sync(1, echo, args=(array,)), 3000)

    rate = pipelined(lambda: jd.rpc_async(1, echo, args=(np.float32(1),)), lambda future: future.result(), 5000)
    return {"numpy": call(np.ones(1, np.float32)), "jax": call(jnp.ones(1)), "rate": rate}


def steps():
    """Return the time of a step of each model, once both ranks have begun to take steps."""
    dp, found = jd.DataParallel(), {}
    for name, ((loss, params, x), number) in MODELS.items():
        step = dp.value_and_grad(loss)
        found[name] = median(lambda step=step, params=params, x=x: jax.block_until_ready(step(params, x)), number)
    return found


def main():
    me = jd.init()
    found = calls() if me.rank == 0 else {}
    jd.barrier()
    found |= steps()
    if me.rank == 0:
        report(**found)
    jd.shutdown()


if __name__ == "__main__":
    main()
