"""Job of pipelines.py: stages that compute, one thread to each rank, and the same work without any waiting."""

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import few, median, report

import jdistgrad as jd
from jdistgrad import pipeline as pp
from jdistgrad.pipeline.stages import StageFunction, StageRecording, Sum

MICROBATCHES, ROWS, WIDTH, LAYERS, STEPS = 8, few(128), few(512), 4, few(8)


def layers(params, x):
    for weights in params:
        x = jnp.tanh(x @ weights)
    return x


def make(count):
    return [jnp.asarray(one) for one in np.random.default_rng(0).normal(size=(count, WIDTH, WIDTH)).astype("float32")]


def mean(output, target):
    return jnp.mean(output)


def alone(chunks):
    """Return the time in which this worker computes its stages and sums for all microbatches, without any waiting."""
    function, params = StageFunction(layers), make(LAYERS // chunks)
    x = jnp.ones((ROWS, WIDTH))

    def run():
        for _ in range(chunks):
            total = Sum(MICROBATCHES)
            for microbatch in range(MICROBATCHES):
                recording = StageRecording(function, (params, x), (True, True), ())
                jax.block_until_ready(recording.pull_inputs([x]))
                total.add(microbatch, recording.pull_parameters())
            jax.block_until_ready(total.leaves)

    return median(run, STEPS, 2)


def step(schedule, chunks):
    placement = schedule.placement
    stages = [(layers, jd.remote(worker, make, args=(LAYERS // chunks,))) for worker in placement]
    pipeline = jd.Pipeline(stages, schedule, loss=mean)
    x = np.ones((MICROBATCHES * ROWS, WIDTH), "float32")

    def run():
        with jd.context():
            pipeline.step(x, targets=x[:, :1])

    return median(run, STEPS, 3)


def measured(name, schedule, chunks=1):
    """Return the time of a step, and that of the work alone, which both ranks do at the same time."""
    other = jd.rpc_async(1, alone, args=(chunks,))
    return {f"{name}_alone": max(alone(chunks), other.result()), name: step(schedule, chunks)}


def main():
    me = jd.init(timeout=300)
    if me.rank == 0:
        report(
            **measured("one_f_one_b", pp.one_f_one_b(2, MICROBATCHES)),
            **measured("interleaved", pp.interleaved(2, MICROBATCHES, 2), 2),
            **measured("zero_bubble", pp.zero_bubble(2, MICROBATCHES)),
        )
    jd.shutdown()


if __name__ == "__main__":
    main()
