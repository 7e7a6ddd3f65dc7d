"""Job of pipelines.py: a backward pass of a stage in two halves, and the same as one compiled function."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import few, in_turn, report

from jdistgrad.pipeline.stages import StageFunction, StageRecording

CALLS = few(50)


def layers(params, x):
    for weights in params:
        x = jax.nn.gelu(x @ weights)
        x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return x


def measured(width, rows):
    draw = np.random.default_rng(0).normal
    params = [jnp.asarray(draw(size=(width, width)) / width**0.5, jnp.float32) for _ in range(4)]
    x = jnp.asarray(draw(size=(rows, width)), jnp.float32)
    forward = jax.jit(lambda params, x: jax.vjp(layers, params, x)[1])
    pull = jax.jit(lambda pullback, cotangent: pullback(cotangent))
    # Each pullback is used once, as in a step: the residuals of a pullback that is used again lie in the cache.
    pullbacks = iter([forward(params, x) for _ in range(CALLS + 20)])
    recordings = iter([StageRecording(StageFunction(layers), (params, x), (True, True), ()) for _ in range(CALLS + 20)])

    def whole():
        jax.block_until_ready(pull(next(pullbacks), x))

    def both():
        recording = next(recordings)
        jax.block_until_ready((recording.pull_inputs([x]), recording.pull_parameters()))

    one, two = in_turn([whole, both], CALLS, lambda: None)
    return {f"one_{width}_{rows}": one, f"two_{width}_{rows}": two}


if __name__ == "__main__":
    report(**measured(few(256), 64), **measured(few(512, 4), 256))
