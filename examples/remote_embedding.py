"""Remote calls and data parallelism in one step: an embedding on a parameter server, the rest replicated.

The last worker owns the embedding. Every other worker is a trainer with a replica of the dense part and sentences of
its own. In each step a trainer's context gathers both gradients: the embedding's stays on the server, and the dense
part's is averaged over the trainers. Then one optimizer updates the embedding and another the replica, where they live.

    jdistgrad run -n 3 examples/remote_embedding.py
    python examples/remote_embedding.py                    # the same as threads of one process
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdistgrad as jd

STEPS, RATE, WORDS, WIDTH, LENGTH, SENTENCES = 40, 1.0, 50, 8, 6, 16


def make_table():
    return jnp.asarray(np.random.default_rng(0).normal(size=(WORDS, WIDTH)), jnp.float32)


def make_dense():
    return {"w": jnp.zeros((WIDTH,)), "b": jnp.zeros(())}


def sentences(trainer):
    """Return sentences of word numbers, and whether even numbers outnumber odd ones in each."""
    words = np.random.default_rng([1, trainer]).integers(WORDS, size=(SENTENCES, LENGTH))
    return jnp.asarray(words), jnp.asarray((words % 2 == 0).mean(axis=1) > 0.5, jnp.float32)


@jax.jit
def lookup(table, words):
    """Return the mean embedding of each sentence. This runs on the server, so the table does not travel."""
    return jnp.take(table, words, axis=0).mean(axis=1)


def classify(features, dense, labels):
    return optax.sigmoid_binary_cross_entropy(features @ dense["w"] + dense["b"], labels).mean()


def loss_fn(table, dense, words, labels):
    features = jd.on(table.owner, lookup)(table, words)
    return classify(features, dense.to_here(), labels)


def train(table, trainers):
    """Train as one of the trainers. Return the mean of all trainers' losses before each step, and the dense part."""
    together = jd.collectives.of_this_world(trainers)
    dp, dense = jd.DataParallel(together), jd.RRef(make_dense())
    server = jd.DistributedOptimizer(optax.sgd(RATE / together.size), [table])  # each trainer's share of the step
    replica = jd.DistributedOptimizer(optax.sgd(RATE), [dense])
    losses = []
    for _ in range(STEPS):
        with jd.context() as ctx:
            loss, _ = jd.backward(ctx, loss_fn, table, dense, *sentences(together.rank))
            dp.average_in(ctx, [dense])  # by now all trainers have read the table
            server.step(ctx)
            replica.step(ctx)
        losses.append(float(together.allreduce(loss)) / together.size)  # by now all trainers have changed the table
    dp.verify(dense.local_value())
    return losses, dense.local_value()


def train_serially(trainers):
    """Train in one process, on the sentences of all trainers."""

    @jax.jit
    def step(params, batches):
        def loss(params):
            return sum(classify(lookup(params[0], words), params[1], labels) for words, labels in batches) / trainers

        value, gradients = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - RATE * g, params, gradients)

    params, losses = (make_table(), make_dense()), []
    for _ in range(STEPS):
        loss, params = step(params, [sentences(trainer) for trainer in range(trainers)])
        losses.append(float(loss))
    return losses, params


def learn():
    """Make the table on the server and let the trainers run; worker 0 calls this."""
    trainers = list(range(max(1, jd.world_size() - 1)))
    table = jd.on(jd.world_size() - 1, make_table).keep()
    running = [jd.on(to, train, timeout=120).start(jd.by_reference(table), trainers) for to in trainers]
    losses, dense = running[0].result()
    for other in running:
        other.result()
    print(f"embedding on {table.owner.name}, {len(trainers)} trainers; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses, (table.to_here(), dense)


def main():
    me = jd.init(timeout=300)  # first calls compile, which takes long on a busy machine
    result = learn() if me.rank == 0 else None
    jd.shutdown()
    return result


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 3)
