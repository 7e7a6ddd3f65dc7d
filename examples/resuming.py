"""A training that saves the whole job every few steps, and goes on from there when it is started again.

Each rank has an encoder of its own on the next rank, whose parameters and optimizer state stay there; the head is
trained data-parallel, with other dropout masks on every rank. Kill it, and start it again: the end is the same, to the
bit.

    jdistgrad run -n 3 --restarts 3 examples/resuming.py checkpoints
    python examples/resuming.py checkpoints                # the same as threads of one process
"""

import hashlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdistgrad as jd

STEPS, EVERY, BATCH, WIDTH = 60, 10, 16, 8


def init_encoder(seed):
    return {"w": jax.random.normal(jax.random.key(seed), (4, WIDTH)) / 2, "b": jnp.zeros(WIDTH)}


@jax.jit
def encode(encoder, x):
    return jnp.tanh(x @ encoder["w"] + encoder["b"])


def loss_fn(head, encoder, key, x, y):
    features = jd.on(encoder.owner, encode)(encoder, x)
    kept = jax.random.bernoulli(key, 0.9, features.shape)
    return jnp.mean((jnp.where(kept, features / 0.9, 0) @ head["w"] + head["b"] - y) ** 2)


def batch(rank, step):
    """Return this rank's rows of a step: a function of both, so that a resumed training sees the same rows."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(rank), step), (BATCH, 4))
    return x, jnp.sin(x).sum(1, keepdims=True)


def train(folder, steps=STEPS, watch=lambda step, loss: None):
    """Train from the last checkpoint on. Return the head, this rank's encoder, and how many steps were left to do."""
    me, dp, tx = jd.worker_info(), jd.DataParallel(), optax.adam(1e-2)
    encoder = jd.on((me.rank + 1) % jd.world_size(), init_encoder).keep(me.rank)
    mine = jd.DistributedOptimizer(tx, [encoder])
    optimizer = jd.per_worker(mine)
    head = {"w": jnp.zeros((WIDTH, 1)), "b": jnp.zeros(1)}
    state, key = tx.init(head), jax.random.key(me.rank)

    differentiate, update = jd.jit(jd.value_and_grad(loss_fn, argnums=(0, 1))), jax.jit(tx.update)

    start, (head, state, key) = jd.restore(folder, (head, state, jd.per_worker(key)), optimizer)
    for step in range(start, steps):
        key, mask = jax.random.split(key)
        with jd.context() as ctx:
            loss, (gradient, _) = differentiate(head, encoder, mask, *batch(me.rank, step))
            mine.step(ctx)
        updates, state = update(dp.average(gradient), state, head)
        head = optax.apply_updates(head, updates)
        watch(step + 1, float(loss))
        if (step + 1) % EVERY == 0:
            jd.save(folder, step + 1, (head, state, jd.per_worker(key)), optimizer)
    return head, encoder.to_here(), steps - start


def digest(tree):
    """Return a few letters that change with any bit of a tree of arrays."""
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))).hexdigest()[:12]


def main(folder=None, steps=STEPS, watch=lambda step, loss: None):
    me = jd.init(timeout=300)
    losses = []

    def watched(step, loss):
        losses.append(loss)
        watch(step, loss)

    *result, done = train(pathlib.Path(folder or sys.argv[1]), steps, watched)
    print(
        f"{me.name}: {done} steps, the last loss {losses[-1] if losses else 0:.3f}, result {digest(result)}\n", end=""
    )
    jd.shutdown()
    return losses, result


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("Which folder are the checkpoints in? examples/resuming.py FOLDER")
    main() if jd.launched() else jd.spawn(main, 3)
