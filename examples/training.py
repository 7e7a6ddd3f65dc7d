"""A flax model whose encoders live on other workers learns to read digits; `make demo` runs this program.

Worker 0 has the images and the head; each other worker has an encoder of its own, whose parameters, gradients and
optimizer state never leave that worker. In a world of one, worker 0 has everything.

    jdistgrad run -n 3 examples/training.py
    python examples/training.py                            # the same as threads of one process
"""

import time

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.progress import Progress, TextColumn

import jdistgrad as jd

STEPS, BATCH, SIDE, WIDTH = 150, 64, 7, 32

# Ten digits, three pixels wide and five high.
GLYPHS = (
    "### .#. ### ### #.# ### ### ### ### ###",
    "#.# ##. ..# ..# #.# #.. #.. ..# #.# #.#",
    "#.# .#. ### .## ### ### ### .#. ### ###",
    "#.# .#. #.. ..# ..# ..# #.# .#. #.# ..#",
    "### ### ### ### ..# ### ### .#. ### ###",
)


def draw(seed, count):
    """Return images of digits at random places in a noisy square, and the digits."""
    random = np.random.default_rng(seed)
    pixels = np.array([[letter == "#" for letter in row.replace(" ", "")] for row in GLYPHS]).reshape(5, 10, 3)
    images, labels = random.normal(0, 0.1, (count, SIDE, SIDE)), random.integers(10, size=count)
    for image, label in zip(images, labels, strict=True):
        top, left = random.integers(SIDE - 4), random.integers(SIDE - 2)
        image[top : top + 5, left : left + 3] += pixels[:, label]
    return jnp.asarray(images, jnp.float32)[..., None], jnp.asarray(labels)


class Encoder(nn.Module):
    """Encoder from images to features."""

    @nn.compact
    def __call__(self, images):
        features = nn.relu(nn.Conv(16, (3, 3))(images))
        features = nn.relu(nn.Conv(16, (3, 3), strides=2)(features))
        return nn.relu(nn.Dense(WIDTH)(features.reshape(len(images), -1)))


def loss_fn(encoders, head, images, labels):
    features = [encoder.rpc_async(images) for encoder in encoders]  # all encoders at once
    logits = head(jnp.concatenate([one.result() for one in features], axis=-1))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean()


def make_model():
    """Make an encoder on each other worker, and the head here."""
    places = range(1, jd.world_size()) if jd.world_size() > 1 else [0]
    encoders = [jd.RemoteModule(rank, Encoder(), draw(0, 1)[:1], rng=rank) for rank in places]
    return encoders, jd.RemoteModule(0, nn.Dense(10), (jnp.zeros((1, WIDTH * len(encoders))),))


def train(encoders, head):
    """Train the model. Return the loss of each step."""
    optimizer = jd.DistributedOptimizer(optax.adam(1e-2), [part.parameters for part in [*encoders, head]])

    @jd.jit
    def step(encoders, head, images, labels):
        (loss, _), gradients = jd.value_and_grad(loss_fn, (0, 1), has_aux=True)(encoders, head, images, labels)
        optimizer.step(gradients)  # each owner steps as soon as its gradients are complete
        return loss

    losses = []
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[loss]}")) as progress:
        task = progress.add_task("training", total=STEPS, loss="compiling")
        for number in range(STEPS):
            losses.append(float(step(encoders, head, *draw(number + 1, BATCH))))
            progress.update(task, advance=1, loss=f"loss {losses[-1]:.3f}")
    return losses


def learn():
    encoders, head = make_model()
    start = time.perf_counter()
    losses = train(encoders, head)
    seconds = time.perf_counter() - start
    _, accuracy = loss_fn(encoders, head, *draw(0, 1000))
    places = ", ".join(encoder.owner.name for encoder in encoders)
    print(f"encoders on {places}; the head on {head.owner.name}; {STEPS} steps in {seconds:.1f} s")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; of 1000 new images {accuracy:.1%} are read correctly")
    return losses, float(accuracy)


def main():
    me = jd.init(timeout=300)  # first calls compile, which takes long on a busy machine
    result = learn() if me.rank == 0 else None
    jd.shutdown()
    return result


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 3)
