"""Pipelines at random, which worker 0 drives, and the same function in one process."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd
from jdistgrad import pipeline as pp
from torture import judging, palette
from torture.judging import Problem
from torture.programs import PipelineProgram


def combine(name: str, params: Any, *inputs: Any) -> Any:
    return functools.reduce(palette.function(name), inputs, params)


STAGES = {name: functools.partial(combine, name) for name in ("mix", "bend", "fast_mix", "fast_bend")}


def weighted(output: Any, target: Any) -> Any:
    return jnp.mean(jnp.sin(output) * target)


def parameters(seed: int, number: int, width: int) -> Any:
    return palette.drawn((seed, number), (width,))


def whole(program: PipelineProgram, values: Sequence[Any], x: Any, y: Any) -> Any:
    """Return the loss of a batch, in one process."""
    results: list[Any] = []
    for name, inputs, number in zip(program.functions, program.inputs, program.shared, strict=True):
        results.append(STAGES[name](values[number], *([results[k] for k in inputs] or [x])))
    return weighted(results[-1], y)


def run(program: PipelineProgram) -> list[Problem]:
    """Take the program's steps; return the problems: losses, or the sum of all gradients, are not the serial ones."""
    schedule, size = pp.Schedule.parse(program.schedule), jd.world_size()
    workers = [k % size for k in range(schedule.workers)]
    numbers, width = sorted(set(program.shared)), program.shape[-1]
    refs = {k: jd.remote(k % size, parameters, args=(program.seed, k, width)) for k in numbers}
    stages = [
        pp.Stage(STAGES[name], refs[number], inputs or None, remat=remat)
        for name, inputs, number, remat in zip(
            program.functions, program.inputs, program.shared, program.remat, strict=True
        )
    ]
    pipeline = jd.Pipeline(stages, schedule, loss=weighted, workers=workers)
    x, y = (np.asarray(palette.drawn((program.seed, k, 1), program.shape)) for k in (1, 2))
    with jd.context() as ctx:
        losses = [pipeline.step(x, targets=y) for _ in range(program.steps)]
        gradients = [jd.rpc_sync(refs[k].owner, gradient_of, args=(ctx.id, jd.by_reference(refs[k]))) for k in numbers]
    loss, expected = jax.value_and_grad(functools.partial(whole, program))(
        {k: parameters(program.seed, k, width) for k in numbers}, x, y
    )
    right = [loss] * program.steps, [program.steps * expected[k] for k in numbers]
    return judging.compare((losses, gradients), right, exactly=False, least_bytes=jnp.result_type(float).itemsize)


def gradient_of(ctx: int, reference: Any) -> Any:
    return jd.get_gradients(ctx)[reference]
