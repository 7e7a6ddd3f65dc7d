"""The examples with parts on several workers: they learn what one process would learn."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.jobs import EXAMPLES, as_job, example as example, output_of

import jdistgrad as jd


def numbers_in(output, pattern):
    return [float(one) for one in re.search(pattern, output).groups()]


def test_three_trainers_share_a_parameter_server(example):
    losses, accuracy = jd.spawn(example("parameter_server").main, 4)[0]
    assert len(losses) == 3 * example("parameter_server").STEPS
    assert np.mean(losses[-20:]) < 0.2 < 2 < losses[0]
    assert accuracy > 0.85


def test_one_trainer_does_what_one_process_does(example, monkeypatch):
    server = example("parameter_server")
    monkeypatch.setattr(server, "STEPS", 20)
    losses, _ = jd.spawn(server.main, 2)[0]
    tx, params = optax.adam(server.RATE), server.init_params(0)
    state, serial = tx.init(params), []
    for batch in server.batches(0, 1):
        loss, gradients = jax.value_and_grad(server.loss_of)(params, *batch)
        updates, state = tx.update(gradients, state)
        params = optax.apply_updates(params, updates)
        serial.append(float(loss))
    np.testing.assert_allclose(losses, serial, rtol=1e-4)


def test_the_split_language_model_learns_what_the_whole_one_does(example):
    model = example("language_model")
    losses, words = jd.spawn(model.main, 3)[0]
    assert losses[-1] < 0.25 < 2 < losses[0]
    assert words == ["fish", "cat", "the"]
    np.testing.assert_allclose(losses[:15], serial_language_model(model, 15), rtol=1e-3)


def serial_language_model(model, steps):
    modules = model.parts()
    params = [module.init(jax.random.key(seed), found)["params"] for seed, (module, found) in enumerate(modules)]
    tx, losses = optax.adam(model.RATE), []
    state = tx.init(params)

    @jax.jit
    def step(params, text):
        def loss_fn(params):
            parts = [lambda x, m=m, p=p: m.apply({"params": p}, x) for (m, _), p in zip(modules, params, strict=True)]
            return model.loss_fn(*parts, text)

        return jax.value_and_grad(loss_fn)(params)

    for number in range(steps):
        loss, gradients = step(params, model.sentences(number))
        updates, state = tx.update(gradients, state)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses


def test_observers_and_learner_keep_the_pole_up_as_one_process_would(example, monkeypatch):
    play = example("reinforcement")
    lengths = jd.spawn(play.main, 3)[0]
    assert lengths[0] < 30
    assert np.mean(lengths[-5:]) > 80
    monkeypatch.setattr(play, "ROUNDS", 5)
    assert serial_lengths(play, observers=2) == lengths[:5]


def serial_lengths(play, observers):
    @jax.jit
    def step(policy, keys):
        def loss_fn(policy):
            losses, lengths = jnp.stack([jnp.stack(play.observe(policy, part)) for part in keys]).mean(0)
            return losses, lengths

        return jax.value_and_grad(loss_fn, has_aux=True)(policy)

    return play.learn(step, observers)


def test_each_is_a_program_of_a_job():
    output = as_job(3, "parameter_server.py", "language_model.py", "reinforcement.py")
    accuracy, *_ = numbers_in(output, r"300 steps; loss .* ([\d.]+)% read correctly")
    first, last = numbers_in(output, r"loss ([\d.]+) -> ([\d.]+); the cat eats the fish")
    start, end = numbers_in(output, r"2 observers; the pole stood for (\d+) moves, then (\d+)")
    assert (accuracy > 85, last < 0.25 < 2 < first, start < 30 < 80 < end) == (True, True, True)


def test_an_inverse_problem_is_solved_through_two_simulations(example, monkeypatch):
    coupled = example("coupled_simulation")
    monkeypatch.setattr(coupled, "STEPS", 25)
    water, misfits = jd.spawn(coupled.main, 3)[0]
    assert misfits[-1] < misfits[0] / 20
    assert np.all(np.diff(water) < 0)


def test_the_derivative_of_legacy_code_is_that_of_finite_differences(example):
    coupled, water, step = example("coupled_simulation"), jnp.array([2.5, 2.2, 1.7]), 0.02

    def cost(water):
        return jnp.sum(coupled.simulate(water, "worker1", "worker2") ** 2)

    with jd.local_workers(3):
        run, gradient = jd.jit(cost), jd.jit(jd.grad(cost))(water)
        for layer, unit in enumerate(np.eye(3, dtype=np.float32)):
            slope = (run(water + step * unit) - run(water - step * unit)) / (2 * step)
            np.testing.assert_allclose(gradient[layer], slope, rtol=1e-2)


@pytest.mark.parametrize("flags", [["--local"], []], ids=["threads", "ranks"])
def test_two_coupled_solvers_have_the_gradient_of_the_whole(flags):
    program = str(EXAMPLES / "partitioned_heat.py")
    output = output_of(["-m", "jdistgrad", "run", *flags, "-n", "3", program], timeout=140)
    error, off = numbers_in(output, r"temperatures: (.*) from the exact ones\ngradient .*: (.*) \(relative\)")
    assert max(error, off) < 1e-10
    before = numbers_in(output, r"solves so far: (\d+) left, (\d+) right")
    *repeated, transposed = numbers_in(output, r"pass: (\d+) left, (\d+) right; (\d+) solves")
    assert repeated == [0, 0]
    assert min(*before, transposed) > 0


def test_the_page_shows_the_coupling_as_it_is():
    *_, shown = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "docs/how-to/solvers.md").read_text(), re.DOTALL)
    program = (EXAMPLES / "partitioned_heat.py").read_text().splitlines()
    assert [line for line in shown.splitlines() if line not in program] == []


def test_the_derivative_in_numpy_is_that_of_finite_differences(example):
    free, chance = np.zeros((4, 3), bool), np.random.default_rng(0)
    free[1:, 1] = True  # up to the cut
    part = example("legacy.heat_in_numpy").Part(free, 0.5, 0.1)
    args, changes = ([1 + chance.random(n) for n in (6, 12, 12)] for _ in range(2))

    def moved(step):
        return part.solve(*(one + step * change for one, change in zip(args, changes, strict=True)))

    sensitivity, step = chance.normal(size=12), 1e-5
    found = part.derivative(*args, moved(0), sensitivity)
    along = sum(np.sum(one * change) for one, change in zip(found, changes, strict=True))
    np.testing.assert_allclose(along, sensitivity @ (moved(step) - moved(-step)) / (2 * step), rtol=1e-7)
