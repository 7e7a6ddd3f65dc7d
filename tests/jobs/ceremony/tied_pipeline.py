"""A small language model in three stages: the first and the last share the embedding, which worker0 has."""

import jax
import jax.numpy as jnp
import optax

import jdistgrad as jd

STEPS, WORDS, WIDTH = 40, 12, 8


def init(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / 2


def embed(embedding, words):
    return embedding[words]


def middle(params, x):
    return x + jnp.tanh(x @ params)


def unembed(embedding, x):
    return x @ embedding.T


def loss_fn(logits, words):
    return optax.softmax_cross_entropy_with_integer_labels(logits, words).mean()


me = jd.init()
if me.rank == 0:
    embedding, params = jd.on(0, init).keep(0, WORDS, WIDTH), jd.on(1, init).keep(1, WIDTH, WIDTH)
    stages = [(embed, embedding), (middle, params), (unembed, embedding)]
    pipeline = jd.Pipeline(stages, jd.pipeline.one_f_one_b(3, 4), loss=loss_fn, workers=[0, 1, 2])
    optimizer = jd.DistributedOptimizer(optax.adam(0.05), pipeline.parameters)
    words = jax.random.randint(jax.random.key(2), (32,), 0, WORDS)
    for _ in range(STEPS):
        loss, gradients = pipeline.value_and_grad(words, targets=(words + 1) % WORDS)
        optimizer.step(gradients)
    print(f"loss {loss:.5f}")
jd.shutdown()
