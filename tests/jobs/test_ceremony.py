"""Five programs as short as a new user would write them: what they compute, and how many lines are ceremony."""

import pathlib
import re
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.jobs import as_job

PROGRAMS = {path.stem: path for path in sorted((pathlib.Path(__file__).parent / "ceremony").glob("*.py"))}
CEREMONY = re.compile(
    r"(\w+ = )?jd\.init\(.*\)|jd\.shutdown\(.*\)|with jd\.context\(.*|if .*rank == 0:|.*\bargs=\(.*|.*by_reference\(.*"
)
BEGIN = "me = jd.init()"


@pytest.fixture(scope="module")
def printed():
    """Run all programs on three ranks; return the numbers that each prints."""
    lines = as_job(3, *PROGRAMS.values()).splitlines()
    numbers = [[float(one) for one in re.findall(r"-?\d+\.\d+", line)] for line in lines]
    return dict(zip(PROGRAMS, numbers, strict=True))


def functions_of(name):
    """Return the functions of a program, which stand before its first call of jdistgrad."""
    found = {}
    exec(PROGRAMS[name].read_text().partition(BEGIN)[0], found)
    return types.SimpleNamespace(**found)


def trained(step, *state, steps):
    """Return the losses of a serial training, and its last state."""
    losses = []
    for k in range(steps):
        loss, *state = step(k, *state)
        losses.append(float(loss))
    return losses, state


def serial_parameter_server():
    f = functions_of("parameter_server")
    gradient, tx = jax.jit(jax.grad(f.loss_fn)), optax.adam(0.05)
    params = {"w": jnp.eye(4), "v": jnp.ones(4)}

    def loss(params):
        return sum(f.loss_fn(params, *f.data(trainer)) for trainer in (1, 2))

    def step(k, params, state, under_way):
        found = dict(under_way)
        updates, state = tx.update(found[k % 2], state)
        params = optax.apply_updates(params, updates)
        return loss(params), params, state, found | {k % 2: gradient(params, *f.data(1 + k % 2))}

    first = {k: gradient(params, *f.data(1 + k)) for k in (0, 1)}
    return trained(step, params, tx.init(params), first, steps=f.STEPS)[0]


def serial_split_learning():
    f = functions_of("split_learning")

    def loss_fn(params):
        encoders, head = params
        hidden = [f.encode(one, f.features(client)) for client, one in zip((1, 2), encoders, strict=True)]
        return f.head_loss(head, hidden, f.answers())

    def step(_, params):
        loss, gradients = jax.jit(jax.value_and_grad(loss_fn))(params)
        return loss, jax.tree.map(f.descend, params, gradients)

    return trained(step, ([f.init(1), f.init(2)], jnp.ones(3)), steps=f.STEPS)[0]


def serial_equinox_data_parallel():
    f, tx = functions_of("equinox_data_parallel"), optax.adam(1e-2)

    def step(k, model, state):
        loss, gradients = eqx.filter_jit(eqx.filter_value_and_grad(f.loss_fn))(model, *f.batch(k))
        updates, state = tx.update(gradients, state)
        return loss, eqx.apply_updates(model, updates), state

    model = eqx.nn.MLP(3, 1, 16, 2, key=jax.random.key(0))
    losses, (model, _) = trained(step, model, tx.init(eqx.filter(model, eqx.is_inexact_array)), steps=f.STEPS)
    return [*losses, float(f.loss_fn(model, *f.batch(f.STEPS)))]


def serial_tied_pipeline():
    f, tx = functions_of("tied_pipeline"), optax.adam(0.05)
    params = f.init(0, f.WORDS, f.WIDTH), f.init(1, f.WIDTH, f.WIDTH)
    words = jax.random.randint(jax.random.key(2), (32,), 0, f.WORDS)

    def loss_fn(params):
        logits = f.unembed(params[0], f.middle(params[1], f.embed(params[0], words)))
        return f.loss_fn(logits, (words + 1) % f.WORDS)

    def step(_, params, state):
        loss, gradients = jax.jit(jax.value_and_grad(loss_fn))(params)
        updates, state = tx.update(gradients, state)
        return loss, optax.apply_updates(params, updates), state

    return trained(step, params, tx.init(params), steps=f.STEPS)[0]


@pytest.mark.parametrize("name", ["parameter_server", "split_learning", "equinox_data_parallel", "tied_pipeline"])
def test_a_program_learns_what_the_serial_one_learns(printed, name):
    losses = globals()[f"serial_{name}"]()
    assert losses[-1] < losses[0] / 2
    np.testing.assert_allclose(printed[name], losses[-1:], rtol=2e-3)


def test_coupled_solvers_have_the_derivative_of_the_iterated_coupling(printed):
    f = functions_of("coupled_solvers")

    def energy(stiffness):
        load = jnp.zeros(3)
        for _ in range(50):
            load = f.structure(f.fluid(load, stiffness), stiffness)
        return jnp.sum(load**2)

    value, gradient = jax.value_and_grad(energy)(jnp.array([0.5, 1.0, 2.0]))
    np.testing.assert_allclose(printed["coupled_solvers"], [value, *gradient], atol=2e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_little_ceremony(name):
    lines = [line.strip() for line in PROGRAMS[name].read_text().splitlines()]
    found = [line for line in lines if CEREMONY.fullmatch(line)]
    assert len(found) == 3, found  # init, shutdown and the choice of rank 0
