"""A parameter server and several trainers that learn to read scikit-learn's digits.

Worker 0 holds the parameters and the optimizer's state. Every other worker is a trainer with its own share of the
images; in each step it fetches the parameters, and sends its gradient to worker 0. Trainers do not wait for each other:
worker 0 applies a step when it arrives. In a world of one, worker 0 is server and trainer.

    jdistgrad run -n 4 examples/parameter_server.py
    python examples/parameter_server.py                    # the same as threads of one process

Needs scikit-learn, for its images.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import Progress
from sklearn.datasets import load_digits

import jdistgrad as jd

STEPS, BATCH, RATE = 150, 64, 5e-3  # steps of each trainer


def digits():
    """Return images as rows, and labels. The last 300 images are for testing."""
    found = load_digits()
    return jnp.asarray(found.data / 16, jnp.float32), jnp.asarray(found.target)


def init_params(seed):
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "hidden": jax.random.normal(first, (64, 32)) / 8,
        "output": jax.random.normal(second, (32, 10)) / 6,
        "bias": jnp.zeros(10),
    }


@jax.jit
def logits_of(params, images):
    return jax.nn.relu(images @ params["hidden"]) @ params["output"] + params["bias"]


@jax.jit
def loss_of(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


def loss_at(params, images, labels):
    """Return the loss for a reference to parameters; the gradient goes to their owner."""
    return loss_of(params.to_here(), images, labels)


def batches(share, shares):
    """Yield one trainer's batches: random choices of its own images."""
    images, labels = digits()
    mine = np.arange(share, len(images) - 300, shares)
    random = np.random.default_rng(share)
    for _ in range(STEPS):
        chosen = random.choice(mine, BATCH)
        yield images[chosen], labels[chosen]


class Board:
    """Progress display and list of losses, on the server."""

    def __init__(self, trainers):
        self.losses, self._progress = [], Progress()
        self._task = self._progress.add_task(f"{trainers} trainers", total=trainers * STEPS)
        self._progress.start()

    def note(self, loss):
        self.losses.append(loss)
        self._progress.advance(self._task)

    def close(self):
        self._progress.stop()


def train(params, optimizer, board, share, shares):
    """Train on one share of the images. ``params`` and ``board`` are references to objects on the server."""
    for images, labels in batches(share, shares):
        with jd.context() as ctx:
            loss, _ = jd.value_and_grad(loss_at)(params, images, labels)
            optimizer.step(ctx)
        board.rpc_sync().note(float(loss))


def serve():
    """Start the trainers and wait for them. Return the losses in order of arrival, and the accuracy on test images."""
    trainers = list(range(1, jd.world_size())) or [0]
    params, board = jd.RRef(init_params(0)), jd.RRef(Board(len(trainers)))
    optimizer = jd.DistributedOptimizer(optax.adam(RATE), [params])
    shared = jd.by_reference(params), optimizer, jd.by_reference(board)
    runs = [jd.on(one, train).start(*shared, k, len(trainers)) for k, one in enumerate(trainers)]
    for run in runs:
        run.result()
    board.local_value().close()
    images, labels = digits()
    accuracy = (logits_of(params.local_value(), images[-300:]).argmax(-1) == labels[-300:]).mean()
    return board.local_value().losses, float(accuracy)


def main():
    me = jd.init(timeout=300)  # first calls compile, which takes long on a busy machine
    result = None
    if me.rank == 0:
        losses, accuracy = result = serve()
        print(
            f"{len(losses)} steps; loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f}; {accuracy:.1%} read correctly"
        )
    jd.shutdown()
    return result


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 4)
