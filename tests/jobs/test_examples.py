"""The examples, as threads and as jobs: they run, and their results are right."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers.jobs import as_job, as_program, example as example

import jdistgrad as jd

SIZES = [1, 3]


@pytest.mark.parametrize("n", SIZES)
def test_the_notes_first_example_finds_the_serial_gradients(example, n):
    found, serial = jd.spawn(example("distributed_autograd").main, n)[0]
    assert len(found) == 2
    for gradient, expected in zip(found, serial, strict=True):
        np.testing.assert_array_equal(gradient, expected)
        assert float(jnp.abs(gradient).min()) > 0


@pytest.mark.parametrize("n", SIZES)
def test_the_notes_second_example_trains_as_one_process_would(example, n):
    for (losses, values), (serial_losses, serial_values) in jd.spawn(example("end_to_end").main, n):
        np.testing.assert_allclose(losses, serial_losses, rtol=1e-5)
        np.testing.assert_allclose(values, serial_values, rtol=1e-5)
        assert losses[-1] < losses[0] / 2


def test_both_examples_of_the_note_are_programs():
    def run(name):
        return as_job(2, name)

    output = run("distributed_autograd.py")
    assert output.count("equal to the serial one: True") == 2
    assert "worker0 -> worker1    worker0 <- worker1  call of __main__.my_add" in output
    assert run("end_to_end.py").count("the serial matrices: True") == 2


@pytest.mark.parametrize("n", [1, 4])
def test_the_model_learns_to_read(example, n):
    losses, accuracy = jd.spawn(example("training").main, n)[0]
    assert losses[0] > 2
    assert np.mean(losses[-10:]) < 0.15
    assert accuracy > 0.95


def test_training_is_what_one_process_would_do(example, monkeypatch):
    training = example("training")
    monkeypatch.setattr(training, "STEPS", 15)
    losses, _ = jd.spawn(training.main, 3)[0]
    np.testing.assert_allclose(losses, serial_losses(training, encoders=2), rtol=1e-3)


def serial_losses(training, encoders):
    encoder, head = training.Encoder(), nn.Dense(10)
    images, _ = training.draw(0, 1)
    features = jnp.zeros((1, encoders * training.WIDTH))
    params = (
        [encoder.init(jax.random.key(k + 1), images)["params"] for k in range(encoders)],
        head.init(jax.random.key(0), features)["params"],
    )

    @jax.jit
    def step(params, state, images, labels):
        def loss_fn(params):
            features = [encoder.apply({"params": one}, images) for one in params[0]]
            logits = head.apply({"params": params[1]}, jnp.concatenate(features, axis=-1))
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    tx = optax.adam(1e-2)
    state, losses = tx.init(params), []
    for number in range(training.STEPS):
        params, state, loss = step(params, state, *training.draw(number + 1, training.BATCH))
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    "run",
    [as_program, lambda name: as_job(1, name), lambda name: as_job(3, name)],
    ids=["threads", "1-rank", "3-ranks"],
)
def test_the_demo_shows_the_loss_falling(run):
    output = run("training.py")
    first, last, accuracy = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+);.* ([\d.]+)% are read", output).groups())
    assert last < 0.2 < 2 < first
    assert accuracy > 95
    assert re.search(r"encoders on worker\d.*; the head on worker0; 150 steps in", output)
