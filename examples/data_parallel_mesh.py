"""The program of data_parallel.py along an axis of a mesh: here eight simulated devices, on a TPU its own.

python examples/data_parallel_mesh.py
"""

import jax
from jax.sharding import PartitionSpec as P

import jdistgrad as jd

RANKS = 8


def train():
    from data_parallel import accuracy, batch, fit, initial, loss_fn

    dp = jd.DataParallel(jd.collectives.Mesh("batch"))
    mesh = jax.make_mesh((RANKS,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def one_rank(params, images, labels):
        loss, gradients = dp.value_and_grad(loss_fn)(params, images, labels)
        return dp.collectives.allreduce(loss) / RANKS, gradients

    step = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=P()))
    losses, params = fit(lambda number, params: step(params, *batch(number)), initial())
    print(f"{RANKS} devices: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {accuracy(params):.1%} are read correctly")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", RANKS)
    train()
