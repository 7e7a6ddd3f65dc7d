"""A pipeline: a small transformer in four stages, on as many workers as there are, learns to read digits.

Eight microbatches are in flight. Three schedules train the same model; their losses are the same, bit for bit, and for
each the last step is shown beside its forecast. With stages this small, messages take as long as computation, and with
fewer cores than workers, waits for a core are counted too.

    jdistgrad run -n 4 examples/pipeline.py                # with fewer ranks, several stages share a rank
    python examples/pipeline.py                            # the same as threads of one process

The images are those of data_parallel.py; the transformer reads their rows one after the other. pipeline_compiled.py
trains it in one compiled program on each rank.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdistgrad as jd

STAGES, MICROBATCHES, STEPS, WIDTH, HEADS, RATE = 4, 8, 40, 32, 4, 1e-2
SCHEDULES = {
    "GPipe": jd.pipeline.gpipe(STAGES, MICROBATCHES),
    "1F1B": jd.pipeline.one_f_one_b(STAGES, MICROBATCHES),
    "zero bubble": jd.pipeline.zero_bubble(STAGES, MICROBATCHES),
}


def init_params(stage, stages=STAGES):
    random = np.random.default_rng(stage)
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "mix": (WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    if stage == 0:
        shapes |= {"pixels": (8, WIDTH), "places": (8, WIDTH)}
    if stage == stages - 1:
        shapes |= {"digits": (WIDTH, 10)}
    return {name: random.normal(0, shape[0] ** -0.5, shape).astype("float32") for name, shape in shapes.items()}


def block(params, x):
    """Return a transformer block's output; x has the shape (images, rows, WIDTH)."""
    queries, keys, values = jnp.split(jax.nn.standardize(x) @ params["qkv"], 3, axis=-1)
    heads = [one.reshape(*x.shape[:2], HEADS, -1) for one in (queries, keys, values)]
    x = x + jax.nn.dot_product_attention(*heads).reshape(x.shape) @ params["mix"]
    return x + jax.nn.gelu(jax.nn.standardize(x) @ params["up"]) @ params["down"]


def embedded(params, images):
    return images.reshape(-1, 8, 8) @ params["pixels"] + params["places"]


def scores(params, x):
    return jax.nn.standardize(x.mean(1)) @ params["digits"]


def first(params, images):
    return block(params, embedded(params, images))


def last(params, x):
    return scores(params, block(params, x))


FUNCTIONS = [first, block, block, last]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(schedule):
    """Return the loss of each step, the report of the last step, and the part of the digits that is read correctly."""
    from data_parallel import batch, digits

    params = [jd.on(stage % jd.world_size(), init_params).keep(stage) for stage in range(STAGES)]
    pipeline = jd.Pipeline(list(zip(FUNCTIONS, params, strict=True)), schedule, loss=cross_entropy)
    optimizer = jd.DistributedOptimizer(optax.adam(RATE), pipeline.parameters)
    losses = []
    for number in range(STEPS):
        images, labels = batch(number)
        loss, gradients = pipeline.value_and_grad(images, targets=labels)
        optimizer.step(gradients)
        losses.append(float(loss))
    report, (images, labels) = pipeline.report(), (part[:1600] for part in digits())
    return losses, report, np.mean(pipeline.apply(images).argmax(-1) == labels)


def learn():
    results = {}
    for name, schedule in SCHEDULES.items():
        losses, report, right = results[name] = train(schedule)
        print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {right:.1%} of the digits are read correctly")
        print(f"{report}\n", flush=True)
    same = len({tuple(losses) for losses, _, _ in results.values()}) == 1
    print(f"the same losses, bit for bit: {same}")
    return results


def main():
    me = jd.init(timeout=300)  # the first steps compile, which takes long on a busy machine
    results = learn() if me.rank == 0 else None
    jd.shutdown()
    return results


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, STAGES)
