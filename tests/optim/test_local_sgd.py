"""Local SGD: ranks that train alone and average their parameters every few steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.collectives.default import of_this_world
from jdistgrad.collectives.host import Local
from jdistgrad.optim.averaging import average_gradients, local_sgd

STEPS = 7


def parameters():
    return {"w": jnp.arange(6.0).reshape(3, 2) / 5, "b": jnp.zeros(2), "s": jnp.float32(0.5)}


def loss(params, x):
    return jnp.mean((x @ params["w"] * params["s"] + params["b"] - 1) ** 2)


def rows(rank, step):
    return np.random.default_rng([rank, step]).normal(rank, 1, size=(4, 3)).astype("float32")


gradient = jax.jit(jax.grad(loss))


def train(tx, rank, steps=STEPS, *, staged=False):
    params = parameters()
    state, update = tx.init(params), jax.jit(tx.update) if staged else tx.update
    for step in range(steps):
        updates, state = update(gradient(params, rows(rank, step)), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def train_serially(size, inner, outer, every, steps=STEPS):
    """Return the parameters of all ranks after so many steps, computed in one process."""
    start = parameters()
    ranks, states, above = [start] * size, [inner.init(start)] * size, outer.init(start)
    for step in range(steps):
        for rank in range(size):
            updates, states[rank] = inner.update(gradient(ranks[rank], rows(rank, step)), states[rank], ranks[rank])
            ranks[rank] = optax.apply_updates(ranks[rank], updates)
        if (step + 1) % every == 0:
            way = jax.tree.map(lambda before, *after: before - sum(after) / size, start, *ranks)
            updates, above = outer.update(way, above, start)
            start = optax.apply_updates(start, updates)
            ranks = [start] * size
    return ranks


OUTER = {
    "averages": None,
    "DiLoCo": optax.sgd(0.7, momentum=0.9, nesterov=True),
    "decay": optax.chain(optax.add_decayed_weights(0.3), optax.sgd(1.0)),
}


@pytest.mark.parametrize("staged", [False, True], ids=["python", "jit"])
@pytest.mark.parametrize(("outer", "every"), [("averages", 1), ("DiLoCo", np.int64(3)), ("decay", 3)])
@on_every_worker
def test_local_sgd_is_the_serial_program(big_world, every, outer, staged, rank, size):
    inner, above = optax.adam(0.05), OUTER[outer]
    found, _ = train(local_sgd(inner, every=every, outer=above), rank, staged=staged)
    expected = train_serially(size, inner, above or optax.sgd(1.0), every)
    assert_close(found, expected[rank], rtol=1e-4, atol=1e-5)


@on_every_worker
def test_an_exchange_after_every_step_averages_gradients(big_world, rank, size):
    found, _ = train(local_sgd(optax.sgd(0.1), every=1), rank)
    expected, _ = train(optax.chain(average_gradients(), optax.sgd(0.1)), rank)
    assert_close(found, expected)


class Counting(Local):
    """Collectives that count the bytes they and their copies reduce."""

    reduced: list[int]

    def run(self, name, memory, how=None):
        if name == "allreduce" and memory.dtype == np.float32:
            self.reduced.append(memory.nbytes)
        return super().run(name, memory, how)

    def twin(self):
        return self


@pytest.mark.one_process
@pytest.mark.parametrize("every", [1, 5])
@on_every_worker
def test_the_bytes_are_divided_by_the_number_of_steps(big_world, every, rank, size):
    counting = of_this_world()
    counting.__class__, counting.reduced = Counting, []
    train(local_sgd(optax.sgd(0.1), every=every, collectives=counting), rank, steps=10)
    assert sum(counting.reduced) == 10 // every * 4 * (6 + 2 + 1)


@pytest.mark.parametrize("staged", [False, True], ids=["python", "jit"])
@on_every_worker
def test_parameters_in_16_bits_with_gradients_in_32(big_world, staged, rank, size):
    tx = local_sgd(optax.sgd(0.5), every=2)
    params = {"w": jnp.full(3, float(rank), jnp.bfloat16)}
    state, update = tx.init({"w": jnp.zeros(3, jnp.bfloat16)}), jax.jit(tx.update) if staged else tx.update
    for _ in range(2):
        updates, state = update({"w": jnp.ones(3, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
    assert_close(params["w"], jnp.full(3, (size - 1) / 2 - 1, jnp.bfloat16))


# A small language model: the next of 12 words after the last two, in texts of a random second-order grammar.

WORDS, ROWS, ROUNDS = 12, 32, 200


def draw_texts(seed):
    random = np.random.default_rng(seed)
    table = np.random.default_rng(99).dirichlet(np.full(WORDS, 0.3), size=(WORDS, WORDS)).cumsum(-1)
    text = list(random.integers(WORDS, size=2))
    for draw in random.random(ROWS * ROUNDS):
        text.append(min(WORDS - 1, int(np.searchsorted(table[text[-2], text[-1]], draw))))
    return np.stack([text[:-2], text[1:-1], text[2:]], -1).reshape(ROUNDS, ROWS, 3)


def new_model():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"words": (WORDS, 16), "hidden": (32, 64), "out": (64, WORDS)}
    return {name: jax.random.normal(key, s) / s[0] ** 0.5 for key, (name, s) in zip(keys, shapes.items(), strict=True)}


def text_loss(model, texts):
    vectors = model["words"][texts[:, :2]].reshape(len(texts), -1)
    logits = jnp.tanh(vectors @ model["hidden"]) @ model["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 2]).mean()


text_gradient = jax.jit(jax.grad(text_loss))


def learn(tx, texts):
    model = new_model()
    state = tx.init(model)
    for batch in texts:
        updates, state = tx.update(text_gradient(model, batch), state, model)
        model = optax.apply_updates(model, updates)
    return model


def test_a_language_model_with_few_exchanges_learns_as_well():
    plain, outer, size = optax.adam(3e-3), optax.sgd(0.7, momentum=0.9, nesterov=True), 3
    adam = optax.GradientTransformation(plain.init, jax.jit(plain.update))

    def main():
        me = jd.init()
        model = learn(local_sgd(adam, every=20, outer=outer), draw_texts(me.rank))
        jd.shutdown()
        return model

    held_out = draw_texts(1000).reshape(-1, 3)
    of_all_ranks = np.concatenate([draw_texts(rank) for rank in range(size)], axis=1)
    models = learn(adam, of_all_ranks), jd.spawn(main, size)[0]
    synchronous, few = (float(text_loss(model, held_out)) for model in models)
    assert synchronous < 0.9 * float(text_loss(new_model(), held_out))
    assert few < 1.02 * synchronous, (few, synchronous)


@on_every_worker
def test_steps_may_donate_the_parameters(big_world, rank, size):
    tx, params = local_sgd(optax.sgd(0.1), every=2), parameters()
    state, apply = tx.init(params), jax.jit(optax.apply_updates, donate_argnums=0)
    for step in range(STEPS - 1):
        updates, state = tx.update(gradient(params, rows(rank, step)), state, params)
        params = apply(params, updates)
    assert_close(params, train_serially(size, optax.sgd(0.1), optax.sgd(1.0), 2, STEPS - 1)[rank])
