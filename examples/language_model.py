"""A language model split over workers: embedding and decoder are remote, the recurrent part is on worker 0.

It learns a small grammar. Only words, word vectors and cotangents travel. Parameters, gradients and optimizer states
stay on the workers of their parts.

    jdistgrad run -n 3 examples/language_model.py
    python examples/language_model.py                      # the same as threads of one process
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.progress import track

import jdistgrad as jd

STEPS, BATCH, LENGTH, WIDTH, RATE = 80, 32, 16, 32, 1e-2

SUBJECTS = {"the cat": "eats the fish .", "the fish": "fears the cat .", "a child": "feeds the fish and the cat ."}
WORDS = sorted({word for pair in SUBJECTS.items() for text in pair for word in text.split()})


def sentences(seed):
    """Return a batch of texts. Subjects are drawn at random; the rest of each sentence follows from its subject."""
    random, subjects = np.random.default_rng(seed), list(SUBJECTS)
    rows = []
    for _ in range(BATCH):
        text: list[str] = []
        while len(text) <= LENGTH:
            subject = subjects[random.integers(len(subjects))]
            text += f"{subject} {SUBJECTS[subject]}".split()
        rows.append([WORDS.index(word) for word in text[: LENGTH + 1]])
    return jnp.asarray(rows)


class Decoder(nn.Module):
    """Decoder from states to the next words' logits."""

    @nn.compact
    def __call__(self, states):
        return nn.Dense(len(WORDS))(nn.relu(nn.Dense(WIDTH)(states)))


def parts():
    """Return each part's module, and an example input to initialize it with."""
    words, vectors = jnp.zeros((1, LENGTH), int), jnp.zeros((1, LENGTH, WIDTH))
    return [
        (nn.Embed(len(WORDS), WIDTH), words),
        (nn.RNN(nn.GRUCell(WIDTH)), vectors),
        (Decoder(), vectors),
    ]


def loss_fn(embed, recur, decode, text):
    """Return the mean cross entropy of each next word. The three parts are functions, wherever they run."""
    logits = decode(recur(embed(text[:, :-1])))
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def make_model():
    """Make the embedding on worker 1, the decoder on the last worker, and the recurrent part here."""
    places = [1 % jd.world_size(), 0, jd.world_size() - 1]
    return [
        jd.RemoteModule(place, module, (example,), rng=seed)
        for seed, (place, (module, example)) in enumerate(zip(places, parts(), strict=True))
    ]


def train(model):
    optimizer = jd.DistributedOptimizer(optax.adam(RATE), [part.parameters for part in model])

    @jd.jit
    def step(embed, recur, decode, text):
        loss, gradients = jd.value_and_grad(loss_fn, argnums=(0, 1, 2))(embed, recur, decode, text)
        optimizer.step(gradients)
        return loss

    numbers = track(range(STEPS), description="learning the grammar")
    return [float(step(*model, sentences(number))) for number in numbers]


def next_word(model, text):
    embed, recur, decode = model
    words = jnp.asarray([[WORDS.index(word) for word in text.split()]])
    return WORDS[int(jnp.argmax(decode(recur(embed(words)))[0, -1]))]


def learn():
    model = make_model()
    losses = train(model)
    print(
        "; ".join(
            f"{name} on {part.owner.name}" for name, part in zip(("embedding", "GRU", "decoder"), model, strict=True)
        )
    )
    words = [
        next_word(model, text) for text in ("the cat eats the", "the fish fears the", "a child feeds the fish and")
    ]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the cat eats the {words[0]}; the fish fears the {words[1]}")
    return losses, words


def main():
    me = jd.init(timeout=300)  # first calls compile, which takes long on a busy machine
    result = learn() if me.rank == 0 else None
    jd.shutdown()
    return result


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 3)
