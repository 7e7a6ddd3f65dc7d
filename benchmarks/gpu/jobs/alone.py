"""Job of table.py: one process measures copies between device and host, and steps on one device."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, SingleDeviceSharding

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
from jobs.data_parallel_jdistgrad import mlp
from measure import in_turn, median, report

import jdistgrad as jd


def copies(nbytes):
    """Measure copies of gradients in 64 leaves."""
    device = jax.local_devices()[0]
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    there = [jnp.ones(nbytes // 64 // 4) * k for k in range(64)]
    here = jax.device_put(there, host)
    fresh = iter(range(10_000))

    def to_numpy():
        values = [leaf + next(fresh) for leaf in there]  # JAX keeps what np.asarray has copied
        return [np.asarray(leaf) for leaf in values]

    return {
        "bytes": nbytes,
        "to_host": median(lambda: jax.block_until_ready(jax.device_put(there, host)), 10, 3),
        "to_device": median(lambda: jax.block_until_ready(jax.device_put(here, SingleDeviceSharding(device))), 10, 3),
        "to_numpy": median(to_numpy, 5, 1),
    }


def steps(layers, width, batch):
    """Measure a step by ``jax.jit`` alone, on a mesh of one device, and over ``Devices`` of one rank."""
    loss, params, x = mlp(layers, width, batch)
    on_mesh = jd.DataParallel(jd.collectives.Mesh("one"))
    mesh = jax.make_mesh((1,), ("one",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = PartitionSpec()

    def averaged(params, x):
        return on_mesh.value_and_grad(loss)(params, x)[1]

    spread = jax.shard_map(averaged, mesh=mesh, in_specs=(whole, PartitionSpec("one")), out_specs=whole)
    runs = {
        "plain": jax.jit(jax.value_and_grad(loss)),
        "mesh": jax.jit(spread),
        "devices": jd.DataParallel(jd.collectives.Devices()).value_and_grad(loss),
    }
    made = [lambda run=run: jax.block_until_ready(run(params, x)) for run in runs.values()]
    return dict(zip(runs, in_turn(made, 30, lambda: None), strict=True))


def main():
    jd.init(devices=True)
    large = jax.default_backend() != "cpu"
    report(**copies((1 << 30) if large else (1 << 22)), **steps(*(8, 4096, 1024) if large else (3, 64, 16)))
    jd.shutdown()


if __name__ == "__main__":
    main()
