"""PyTorch's pipeline example (distributed/rpc/pipeline): a residual network in two shards, and a master that trains it.

It prints the time of a step with the batch in 1, 2, 4 and 8 microbatches. (PyTorch's program uses these numbers as the
numbers of images in one.) There only the forward pass is pipelined; here both passes are, by 1F1B. The network is a
small one of the same build, fit for CPUs: 4 bottlenecks instead of 16, a sixteenth of the channels, images of 32
instead of 128 pixels. Channels are normalized in groups within each image, as the stages of a pipeline have no running
averages of a batch.

    jdistgrad run -n 3 examples/pipeline_two_shards.py
    python examples/pipeline_two_shards.py                 # the same as threads of one process
"""

import time

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jdistgrad as jd

SPLITS, BATCHES, BATCH, SIDE, CLASSES, WIDTH = (1, 2, 4, 8), 3, 24, 32, 100, 4


class Bottleneck(nn.Module):
    """Three convolutions around which the input is added; the last one has four times as many channels."""

    width: int
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        inner = nn.relu(nn.GroupNorm(WIDTH)(nn.Conv(self.width, (1, 1), use_bias=False)(x)))
        inner = nn.relu(nn.GroupNorm(WIDTH)(nn.Conv(self.width, (3, 3), self.stride, use_bias=False)(inner)))
        inner = nn.GroupNorm(WIDTH)(nn.Conv(4 * self.width, (1, 1), use_bias=False)(inner))
        if x.shape != inner.shape:
            x = nn.GroupNorm(WIDTH)(nn.Conv(4 * self.width, (1, 1), self.stride, use_bias=False)(x))
        return nn.relu(x + inner)


class Shard1(nn.Module):
    """The first half, from images to features."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(WIDTH)(nn.Conv(WIDTH, (7, 7), 2, use_bias=False)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for width, stride in ((WIDTH, 1), (2 * WIDTH, 2)):
            x = Bottleneck(width, stride)(x)
        return x


class Shard2(nn.Module):
    """The second half, from features to the scores of the classes."""

    @nn.compact
    def __call__(self, x):
        for width, stride in ((4 * WIDTH, 2), (8 * WIDTH, 2)):
            x = Bottleneck(width, stride)(x)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


def make_shards():
    """Make the shards on worker1 and worker2, or as many of them as there are."""
    images = jnp.zeros((1, SIDE, SIDE, 3))
    features = jnp.zeros((1, SIDE // 8, SIDE // 8, 8 * WIDTH))
    return [
        jd.RemoteModule(1 % jd.world_size(), Shard1(), (images,), rng=1),
        jd.RemoteModule(2 % jd.world_size(), Shard2(), (features,), rng=2),
    ]


def batch(seed):
    """Return random images, and a random class of each as a row with a one, as in PyTorch's program."""
    random = np.random.default_rng(seed)
    images = random.normal(size=(BATCH, SIDE, SIDE, 3)).astype("float32")
    return images, np.eye(CLASSES, dtype="float32")[random.integers(CLASSES, size=BATCH)]


def mean_square(scores, targets):
    return jnp.mean((scores - targets) ** 2)


def train(shards, splits):
    """Return the seconds of a step, the fastest of several, and the losses."""
    seconds, losses = [], []
    pipeline = jd.Pipeline(shards, jd.pipeline.one_f_one_b(2, splits), loss=mean_square)
    optimizer = jd.DistributedOptimizer(optax.sgd(0.05), [shard.parameters for shard in shards])
    for number in range(1 + BATCHES):  # the first step compiles
        images, targets = batch(number)
        start = time.perf_counter()
        with jd.context() as ctx:
            losses.append(float(pipeline.step(images, targets=targets)))
            optimizer.step(ctx)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]), losses


def run_master():
    shards, results = make_shards(), {}
    start = [shard.variables() for shard in shards]
    for splits in SPLITS:
        for shard, variables in zip(shards, start, strict=True):
            shard.restore(variables)
        seconds, losses = results[splits] = train(shards, splits)
        print(f"splits {splits}: {1e3 * seconds:.0f} ms a step; losses {', '.join(f'{loss:.4f}' for loss in losses)}")
    return results


def main():
    me = jd.init(timeout=300)  # the first steps compile, which takes long on a busy machine
    results = run_master() if me.rank == 0 else None
    jd.shutdown()
    return results


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 3)
