"""Job of data_parallel.py: two ranks, with one thread each, measure data-parallel steps beside local steps."""

import os

os.environ["NPROC"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import pathlib
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import few, in_turn, report

import jdistgrad as jd

MIB = 1 << 20


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape) / np.sqrt(shape[0]), jnp.float32)


def mlp(layers, width, batch=64):
    layers, width = few(layers), few(width, 8)

    def loss(params, x):
        for layer in params:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return jnp.mean(x**2)

    return loss, [{"w": normal(width, width), "b": jnp.zeros(width)} for _ in range(layers)], normal(batch, width)


def norm(layer, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * layer["scale"] + layer["bias"]


def attend(layer, x, heads=4):
    q, k, v = ((x @ layer[name]).reshape(*x.shape[:2], heads, -1) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["out"]


def transformer(layers=few(4, 1), width=few(256, 8), length=few(128, 4), batch=8):  # noqa: B008
    def loss(params, x):
        for layer in params:
            x = x + attend(layer, norm(layer["before"], x))
            h = jax.nn.relu(norm(layer["between"], x) @ layer["up"] + layer["up_bias"])
            x = x + h @ layer["down"] + layer["down_bias"]
        return jnp.mean(x**2)

    def layer():
        unit = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
        square = {name: normal(width, width) for name in ("q", "k", "v", "out")}
        wide = {"up": normal(width, 4 * width), "up_bias": jnp.zeros(4 * width)}
        narrow = {"down": normal(4 * width, width), "down_bias": jnp.zeros(width)}
        return {"before": unit, "between": unit, **square, **wide, **narrow}

    return loss, [layer() for _ in range(layers)], normal(batch, length, width)


def steps(name, model, calls):
    loss, params, x = model
    local, together = jax.jit(jax.value_and_grad(loss)), jd.DataParallel().value_and_grad(loss)
    runs = [lambda step=step: jax.block_until_ready(step(params, x)) for step in (local, together)]
    found = in_turn(runs, calls, MPI.COMM_WORLD.Barrier)
    return {f"{name}_local": found[0], f"{name}_step": found[1]}


def overwriting(dp, like):
    """Return the seconds to average gradients in place, as a step does, once all ranks have them."""
    fresh = jax.block_until_ready([leaf + 1 for leaf in like])
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    reduction = dp.reduction(like)
    for k, gradient in enumerate(fresh):
        reduction.ready(k, gradient)
    reduction.finish()
    return time.perf_counter() - start


def reductions(params):
    """Measure averages of the same gradients in buckets and one by one, in place and into new arrays."""
    both = jd.DataParallel(), jd.DataParallel(bucket_cap_mb=1e-6)
    leaves = jax.tree.leaves(params)
    rounds = [[overwriting(dp, leaves) for dp in both] for _ in range(3 + few(20))][3:]
    found = [float(np.median(times)) for times in zip(*rounds, strict=True)]
    found += in_turn([lambda dp=dp: dp.average(params) for dp in both], 20, MPI.COMM_WORLD.Barrier)
    return dict(zip(("buckets", "one_by_one", "buckets_anew", "one_by_one_anew"), found, strict=True))


def asking():
    """Measure a compiled average of four buckets, with and without the ranks' meeting before it."""
    tree = [jnp.ones(64) for _ in range(4)]
    runs = [jax.jit(jd.DataParallel(bucket_cap_mb=1e-6, check=check).average) for check in (True, False)]
    found = in_turn([lambda run=run: jax.block_until_ready(run(tree)) for run in runs], 500, MPI.COMM_WORLD.Barrier, 50)
    return dict(zip(("asked", "unasked"), found, strict=True))


def large(leaves):
    """Measure an average of 64 MiB of gradients in so many leaves."""
    like = [jnp.zeros(few(64 * MIB, MIB) // 4 // leaves)] * leaves
    dp = jd.DataParallel(bucket_cap_mb=64)
    return float(np.median([overwriting(dp, like) for _ in range(2 + few(6))][2:]))


def hidden(buckets=10, seconds=0.1):
    """Return the share of communication that is hidden in the backward pass, if both take equally long."""

    def late(bucket, state, collectives):
        time.sleep(seconds)
        return collectives.allreduce(bucket.flat) / bucket.divisor, state

    @jax.custom_vjp
    def slow(w, x):
        return w * x

    def pull(kept, g):
        g = jax.pure_callback(lambda g: (time.sleep(seconds), g)[1], g, g)
        return g * kept[1], g * kept[0]

    slow.defvjp(lambda w, x: (w * x, (w, x)), pull)

    def loss(params, x):
        for w in params:
            x = slow(w, x)
        return jnp.sum(x)

    buckets = few(buckets)
    hook = jd.hooks.Hook(lambda bucket: (), late, "late")
    dp = jd.DataParallel(bucket_cap_mb=1e-6, hook=hook, overlap=True)
    step = dp.value_and_grad(loss)
    for _ in range(few(3)):
        step([jnp.ones(8)] * buckets, jnp.ones(8))
    return dp.statistics().overlap / dp.statistics().communication


def memory(differentiate):
    """Return how far steps raise this process's peak memory, in copies of the gradients."""
    loss, params, x = mlp(4, 2048)
    step, before = differentiate(loss), peak()
    for _ in range(few(30)):
        gradients = step(params, x)[1]
        jax.block_until_ready(gradients)
    return (peak() - before) / sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    me = jd.init()
    found = {"memory": memory(jd.DataParallel().value_and_grad)}
    found |= steps("deep", mlp(64, 256), 20) | steps("wide", mlp(4, 2048), 12) | steps("transformer", transformer(), 8)
    found |= reductions(mlp(64, 256)[1]) | asking()
    found |= {"large_1": large(1), "large_16": large(16), "hidden": hidden()}
    if me.rank == 0:
        report(**found)
    jd.shutdown()


if __name__ == "__main__":
    main()
