"""Job of devices.py: two ranks, with one thread each, measure steps over their devices, by hand, and over MPI."""

import os

os.environ["NPROC"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import pathlib
import sys

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec
from mpi4py import MPI

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from jobs.data_parallel_jdistgrad import mlp, transformer
from measure import SHORT, in_turn, report

import jdistgrad as jd


def by_hand(loss, params, x, *, together):
    """Return the step as users of jax.shard_map write it, on global arrays that stay global.

    Arguments:
      together: average all gradients as one array.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))

    def one(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        if not together:
            return value[None], jax.lax.pmean(gradients, "ranks")
        flat, parts = ravel_pytree(gradients)
        return value[None], parts(jax.lax.pmean(flat, "ranks"))

    whole, rows = PartitionSpec(), PartitionSpec("ranks")
    step = jax.shard_map(one, mesh=mesh, in_specs=(whole, rows), out_specs=(rows, whole), check_vma=False)
    everywhere = jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(NamedSharding(mesh, whole), np.asarray(leaf)), params
    )
    batch = jax.make_array_from_process_local_data(NamedSharding(mesh, rows), np.asarray(x))
    return jax.jit(step), everywhere, batch


def steps(name, model, calls):
    loss, params, x = model
    devices, mpi = (jd.DataParallel(kind()) for kind in (jd.collectives.Devices, jd.collectives.MPI))
    runs = {
        "local": (jax.jit(jax.value_and_grad(loss)), params, x),
        "hand": by_hand(loss, params, x, together=False),
        "hand_flat": by_hand(loss, params, x, together=True),
        "devices": (devices.value_and_grad(loss), params, x),
        "devices_jit": (devices.jit(devices.value_and_grad(loss)), params, x),
        "mpi": (mpi.value_and_grad(loss), params, x),
    }
    made = [lambda run=run: jax.block_until_ready(run[0](*run[1:])) for run in runs.values()]
    found = in_turn(made, calls, MPI.COMM_WORLD.Barrier)
    return {f"{name}_{kind}": seconds for kind, seconds in zip(runs, found, strict=True)}


def main():
    me = jd.init(devices=True)  # before the first array
    models = {"small": (mlp(3, 16), 300), "deep": (mlp(64, 256), 20), "wide": (mlp(4, 2048), 12)}
    models |= {} if SHORT else {"transformer": (transformer(), 8)}
    found = {}
    for name, (model, calls) in models.items():
        found |= steps(name, model, calls)
    if me.rank == 0:
        report(**found)
    jd.shutdown()


if __name__ == "__main__":
    main()
