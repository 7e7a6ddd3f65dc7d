"""A pipeline as one compiled program: each rank has a block of the transformer of pipeline.py, and all do the same.

In every tick of a ``jax.lax.scan`` each rank computes its block for one microbatch, and ``shift`` hands the result to
the next rank. Its transpose hands the cotangents back, so ``jax.grad`` is the backward pass of the pipeline. In such a
step Python does little more than let the ranks meet, which pays where a stage takes a fraction of a millisecond.
``jd.Pipeline`` is for all else: stages that differ, other schedules, errors that name stage and microbatch. The program
compares loss and gradients with those of the whole transformer in one process.

    jdistgrad run -n 3 examples/pipeline_compiled.py
    python examples/pipeline_compiled.py                   # the same as threads of one process
"""

import functools
import statistics
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
    waits = ranks.size - 1  # the last rank gets the first microbatch after so many ticks

    def tick(before, image):
        x = embedded(params, image) if is_first else 0.0
        output = jax.checkpoint(block)(params, ranks.shift(before, wrap=False, edge=x))
        return output, output

    # While the pipeline fills and drains, blocks compute with filling. Their derivatives must be finite there.
    filling = jnp.repeat(images[:1], waits, axis=0)
    start = jnp.broadcast_to(jnp.linspace(-1, 1, WIDTH), (images.shape[1], 8, WIDTH))
    outputs = jax.lax.scan(tick, start, jnp.concatenate([images, filling]))[1][waits:]
    if is_last:
        return jnp.mean(jax.vmap(lambda one, known: cross_entropy(scores(params, one), known))(outputs, labels))
    return 0.0 * jnp.sum(outputs)  # with a plain 0, this rank would leave the backward pass out


def loss_of_the_whole(params, images, labels):
    """Return the loss of the transformer in one piece. ``params``: of all its blocks."""
    x = embedded(params[0], images.reshape(-1, images.shape[-1]))
    for mine in params:
        x = block(mine, x)
    return cross_entropy(scores(params[-1], x), labels.reshape(-1))


def difference(found, expected):
    """Return by how much two trees differ at most, each leaf relative to the largest number in the second tree's."""
    leaves = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)), found, expected)
    return float(jnp.max(jnp.stack(jax.tree.leaves(leaves))))  # NaN if one is


@jax.jit
def update(params, state, gradients):
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def main():
    """Train; return the losses, and by how much the first step's loss and gradients differ from those of the whole."""
    me = jd.init(timeout=300)
    ranks = jd.collectives.of_this_world()
    params = init_params(me.rank, ranks.size)
    step = jax.jit(jax.value_and_grad(functools.partial(loss_fn, ranks=ranks)))

    found = step(params, *microbatches(0))
    blocks = [init_params(stage, ranks.size) for stage in range(ranks.size)]
    loss, gradients = jax.value_and_grad(loss_of_the_whole)(blocks, *microbatches(0))
    is_last = me.rank == ranks.size - 1
    differs = difference(found if is_last else found[1], (loss, gradients[-1]) if is_last else gradients[me.rank])

    state, losses, times = OPTIMIZER.init(params), [], []
    for number in range(STEPS):
        start = time.perf_counter()
        loss, gradients = step(params, *microbatches(number))
        params, state = update(params, state, gradients)
        losses.append(float(loss))
        times.append(time.perf_counter() - start)
    if is_last:
        print(f"loss and gradients on {ranks.size} ranks: {differs:.0e} from those in one piece")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {1e3 * statistics.median(times):.1f} ms a step")
    jd.shutdown()
    return losses, differs


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 3)
