"""The program of data_parallel.py along an axis of a mesh: eight simulated CPU devices, or those of a TPU.

python examples/data_parallel_mesh.py
jdistgrad run -n 2 examples/data_parallel_mesh.py      # a mesh over the devices of several processes

There are 8 devices with 1, 2, 4 or 8 processes, and 6 with 3 or 6. The program takes no other number of processes.
The program does not run under `jdistgrad run --local`: JAX joins the devices of processes, not of threads.
"""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jdistgrad as jd

DEVICES = 8  # at most


def train():
    from data_parallel import accuracy, batch, fit, initial, loss_fn

    dp = jd.DataParallel(jd.collectives.Mesh("batch"))
    ranks = min(DEVICES, jax.device_count())
    mesh = jax.make_mesh((ranks,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def one_rank(params, images, labels):
        loss, gradients = dp.value_and_grad(loss_fn)(params, images, labels)
        return dp.collectives.allreduce(loss) / ranks, gradients

    step = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=P()))
    start = jax.tree.map(np.asarray, initial())  # the same on every process
    losses, params = fit(lambda number, params: step(params, *batch(number)), start)
    if jax.process_index() == 0:
        right = accuracy(jax.tree.map(np.asarray, params))
        where = f"{ranks} devices" + (f" of {jax.process_count()} processes" if jd.launched() else "")
        print(f"{where}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {right:.1%} are read correctly")
    return losses


def divide_devices_among_processes():
    """Let the CPU devices of all processes form one mesh. Accelerators need the last line only."""
    from mpi4py import MPI

    jax.config.update("jax_num_cpu_devices", DEVICES // MPI.COMM_WORLD.size)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(cluster_detection_method="mpi4py")


if __name__ == "__main__":
    if jd.launched():
        divide_devices_among_processes()
    else:
        jax.config.update("jax_num_cpu_devices", DEVICES)
    train()
