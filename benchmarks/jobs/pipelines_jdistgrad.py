"""Job of pipelines.py: worker 0 takes steps of pipelines over all ranks."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import median, report

import jdistgrad as jd
from jdistgrad import pipeline as pp
from jdistgrad.ffi.lowering import lower
from jdistgrad.wire.polling import pause

MICROBATCHES = 8


def make(width):
    return jnp.ones(width)


def scale(params, x):
    return x * params[0]


def mean(output, target):
    return jnp.mean(output)


# The identity, after exactly so many seconds. ``jax.pure_callback`` with ``time.sleep`` takes 0.3 ms more than it
# sleeps, and those are not the pipeline's.
sleep_p = Primitive("sleep")
sleep_p.def_abstract_eval(lambda x, seconds: x)


def asleep(x, *, seconds):
    pause(seconds)
    return [x]


def slept(context, x, *, seconds):
    return lower(context, [x], context.avals_in, functools.partial(asleep, seconds=seconds), quick=True)


mlir.register_lowering(sleep_p, slept, platform="cpu")


def sleep(seconds, x):
    return sleep_p.bind(x, seconds=seconds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sleeping(seconds, halves, params, x):
    """The identity, which takes ``seconds`` forward and twice as long backward: in one sleep, or one in each half."""
    return sleep(seconds, x)


def backward(seconds, halves, params, cotangent):
    # The parameters' gradient needs the cotangent's sleep: the first stage, whose inputs have no gradients, sleeps too.
    if halves:
        slept = sleep(seconds, cotangent)
        return sleep(seconds, params + 0 * slept[0]), slept
    slept = sleep(2 * seconds, cotangent)
    return params + 0 * slept[0], slept


sleeping.defvjp(lambda seconds, halves, params, x: (sleep(seconds, x), params), backward)


@functools.cache
def sleeper(seconds, *, halves):
    return jd.register(functools.partial(sleeping, seconds, halves), name=f"sleeping {seconds} {halves}")


def pipeline_of(functions, schedule):
    """Return a pipeline of stages in turn on all ranks."""
    placement = schedule.placement
    stages = [(function, jd.remote(placement[k], make, args=(4,))) for k, function in enumerate(functions)]
    return jd.Pipeline(stages, schedule, loss=mean)


def step(pipeline, x, calls):
    def run():
        with jd.context():
            pipeline.step(x, targets=x[:, :1])

    return median(run, calls, 10)


def own_time(bytes_between):
    """Return the time of a step for each action of a worker."""
    schedule = pp.one_f_one_b(jd.world_size(), MICROBATCHES)
    x = np.ones((MICROBATCHES, bytes_between // 4), "float32")
    return step(pipeline_of([scale] * schedule.stages, schedule), x, 100) / len(schedule.actions[0])


def sleeping_steps(schedule, seconds, calls=8):
    x = np.ones((schedule.microbatches, 4), "float32")
    halves = any(one.kind is pp.Kind.WEIGHT for row in schedule.actions for one in row)
    return step(pipeline_of([sleeper(seconds, halves=halves)] * schedule.stages, schedule), x, calls)


def main():
    me, size = jd.init(), None
    for seconds in (0.005, 0.0025):
        for halves in (False, True):
            sleeper(seconds, halves=halves)
    if me.rank == 0:
        size = jd.world_size()
        orders = {
            "one_f_one_b": (pp.one_f_one_b(size, MICROBATCHES), 0.005),
            "zero_bubble": (pp.zero_bubble(size, MICROBATCHES), 0.005),
            "interleaved": (pp.interleaved(size, MICROBATCHES, 2), 0.0025),
        }
        if size > 2:
            orders = {
                "one_f_one_b": (pp.one_f_one_b(size, 16), 0.005),
                "zero_bubble": (pp.zero_bubble(size, 16), 0.005),
            }
        found = {f"sleeping_{name}_{size}": sleeping_steps(*order) for name, order in orders.items()}
        if size == 2:
            found |= {"own_4k": own_time(4 << 10), "own_1m": own_time(1 << 20)}
        report(**found)
    jd.shutdown()


if __name__ == "__main__":
    main()
