"""A pipeline as one compiled program: each rank has a block of the transformer of pipeline.py, and all do the same.

In every tick of a ``jax.lax.scan`` each rank computes its block for one microbatch, and ``shift`` hands the result to
the next rank. Its transpose hands the cotangents back, so ``jax.grad`` is the backward pass of the pipeline. During a
step no Python runs, which matters where stages take less than a millisecond. ``jd.Pipeline`` is for all else: stages
that differ, other schedules, errors that name stage and microbatch. The program compares loss and gradients with those
of the whole transformer in one process.

    jdistgrad run -n 3 examples/pipeline_compiled.py
    python examples/pipeline_compiled.py                   # the same as threads of one process
"""

import functools
import time

import jax
import jax.numpy as jnp
import optax
from data_parallel import batch
from pipeline import RATE, WIDTH, block, cross_entropy, embedded, init_params, scores

import jdistgrad as jd

MICROBATCHES, STEPS = 8, 40
OPTIMIZER = optax.adam(RATE)


def microbatches(number):
    """Return the images and labels of a step's batch, by microbatches."""
    return [part.reshape(MICROBATCHES, -1, *part.shape[1:]) for part in batch(number)]


def loss_fn(params, images, labels, ranks):
    """Return this rank's part of the loss: all of it on the last rank, 0 on the others."""
    is_first, is_last = ranks.rank == 0, ranks.rank == ranks.size - 1
    rows, waits = images.shape[1], ranks.size - 1  # the last rank gets the first microbatch after so many ticks

    def tick(before, image):
        entering = embedded(params, image) if is_first else 0.0
        output = jax.checkpoint(block)(params, ranks.shift(before, wrap=False, edge=entering))
        return output, output

    none_more = jnp.zeros((waits, *images.shape[1:]))
    start = jnp.zeros((rows, 8, WIDTH))
    outputs = jax.lax.scan(tick, start, jnp.concatenate([images, none_more]))[1][waits:]
    if is_last:
        return jnp.mean(jax.vmap(lambda one, known: cross_entropy(scores(params, one), known))(outputs, labels))
    return 0.0 * jnp.sum(outputs)  # 0, but it depends on the outputs: this rank takes part in the backward pass


def loss_of_the_whole(params, images, labels):
    """Return the loss of the transformer in one piece. ``params``: of all its blocks."""
    x = embedded(params[0], images.reshape(-1, images.shape[-1]))
    for mine in params:
        x = block(mine, x)
    return cross_entropy(scores(params[-1], x), labels.reshape(-1))


def difference(found, expected):
    """Return by how much two trees differ, relative to the largest number in the second one."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    return max(jnp.max(jnp.abs(a - b)) for a, b in pairs) / max(jnp.max(jnp.abs(b)) for _, b in pairs)


@jax.jit
def update(params, state, gradients):
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def main():
    """Train; return the losses, and by how much the first gradients differ from those of the whole."""
    me = jd.init(timeout=300)
    ranks = jd.collectives.of_this_world()
    params = init_params(me.rank, ranks.size)
    step = jax.jit(jax.value_and_grad(functools.partial(loss_fn, ranks=ranks)))

    all_params = [init_params(stage, ranks.size) for stage in range(ranks.size)]
    expected = jax.grad(loss_of_the_whole)(all_params, *microbatches(0))[me.rank]
    off = float(difference(step(params, *microbatches(0))[1], expected))

    state, losses, start = OPTIMIZER.init(params), [], time.perf_counter()
    for number in range(STEPS):
        loss, gradients = step(params, *microbatches(number))
        params, state = update(params, state, gradients)
        losses.append(float(loss))
    took = (time.perf_counter() - start) / STEPS
    if me.rank == ranks.size - 1:
        print(f"gradients on {ranks.size} ranks: {off:.0e} from those in one piece")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {1e3 * took:.1f} ms a step")
    jd.shutdown()
    return losses, off


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 3)
