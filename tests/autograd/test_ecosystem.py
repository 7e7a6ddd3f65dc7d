"""Programs of diffrax, optimistix, equinox, flax and numpyro over functions of other workers, unchanged."""

import diffrax
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optimistix as optx
import pytest
from helpers.data import assert_close
from helpers.worlds import on_worker0, rank, wait_until_nobody_takes_part

import jdistgrad as jd

Y0, RATES = jnp.array([1.0, 0.5, -0.3]), jnp.array([0.7, 1.3, 0.2])


@jax.jit
def decay(t, y, rates):
    return -rates * y + 0.1 * jnp.sin(t)


def remotely(function, to=1):
    return jd.on(rank(to), function)


def here(function, to=1):
    return function


def calls_of(run):
    """Return what ``run`` returns, and the number of calls that it makes."""
    with jd.timeline() as recorded:
        found = jax.block_until_ready(run())
    return found, sum(one.kind == "call" for one in recorded.events)


ADJOINTS = {
    "checkpoints": diffrax.RecursiveCheckpointAdjoint(),
    "direct": diffrax.DirectAdjoint(),
    "backsolve": diffrax.BacksolveAdjoint(),
}


def solved(place, adjoint, y0, rates, steps=4):
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(place(decay)),
        diffrax.Tsit5(),
        0.0,
        1.0,
        1 / steps,
        y0,
        args=rates,
        adjoint=adjoint,
        max_steps=steps,
    )
    return jnp.sum(solution.ys**2)


@pytest.mark.parametrize("stage", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("adjoint", ADJOINTS.values(), ids=ADJOINTS)
@on_worker0
def test_an_ode_of_diffrax(big_world, adjoint, stage):
    found = stage(jax.value_and_grad(lambda y, r: solved(remotely, adjoint, y, r), (0, 1)))(Y0, RATES)
    assert_close(found, jax.value_and_grad(lambda y, r: solved(here, adjoint, y, r), (0, 1))(Y0, RATES))
    wait_until_nobody_takes_part()


@on_worker0
def test_a_solver_makes_the_calls_that_its_stages_need(big_world):
    run = jax.jit(lambda y, r, steps=4: solved(remotely, ADJOINTS["checkpoints"], y, r, steps), static_argnums=2)
    counts = []
    for steps in (4, 8):
        run(Y0, RATES, steps)
        counts.append(calls_of(lambda steps=steps: run(Y0, RATES, steps))[1])
    # Tsit5 has 7 stages, the first of which is the last of the step before.
    assert counts[1] - counts[0] == 4 * 6
    assert counts[0] <= 4 * 6 + 2


@jax.jit
def residual(y, rates):
    return y + 0.3 * jnp.tanh(rates * y) - 1


@pytest.mark.parametrize("adjoint", [optx.ImplicitAdjoint(), optx.RecursiveCheckpointAdjoint()])
@on_worker0
def test_a_root_of_optimistix(big_world, adjoint):
    def root(place, rates):
        found = optx.root_find(
            place(residual), optx.Newton(rtol=1e-6, atol=1e-6), jnp.ones(3), args=rates, adjoint=adjoint, max_steps=16
        )
        return jnp.sum(found.value**2)

    found = jax.jit(jax.value_and_grad(lambda rates: root(remotely, rates)))(RATES)
    assert_close(found, jax.value_and_grad(lambda rates: root(here, rates))(RATES))
    wait_until_nobody_takes_part()


@on_worker0
def test_a_module_of_equinox(big_world):
    """A module is a pytree and a function: here it is an argument, differentiated, and the function that runs there."""
    model = eqx.nn.MLP(3, 2, 8, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(place, arrays, x):
        return jnp.sum(place(lambda arrays, x: eqx.combine(arrays, static)(x))(arrays, x) ** 2)

    found = eqx.filter_value_and_grad(lambda arrays: loss(remotely, arrays, Y0))(arrays)
    assert_close(found, eqx.filter_value_and_grad(lambda arrays: loss(here, arrays, Y0))(arrays))
    wait_until_nobody_takes_part()


@on_worker0
def test_a_module_of_flax(big_world):
    model, x = nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(2)]), jnp.stack([Y0, RATES])
    params = model.init(jax.random.key(0), x)
    found = jax.jit(jax.grad(lambda p: jnp.sum(remotely(model.apply)(p, x) ** 2)))(params)
    assert_close(found, jax.grad(lambda p: jnp.sum(model.apply(p, x) ** 2))(params))
    wait_until_nobody_takes_part()


@jax.jit
def predict(weights, x):
    return jnp.tanh(x @ weights)


@on_worker0
def test_a_posterior_of_numpyro(big_world):
    """The likelihood's mean is computed on another worker; NUTS differentiates through the call."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)), jnp.float32)
    y = predict(Y0, x)

    def model(place):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), 1.0))
        numpyro.sample("y", dist.Normal(place(predict, to=2)(weights, x), 0.1), obs=y)

    def energy(place):
        return numpyro.infer.util.potential_energy(model, (place,), {}, {"weights": RATES})

    def gradient(place):
        return jax.grad(lambda w: numpyro.infer.util.potential_energy(model, (place,), {}, {"weights": w}))(RATES)

    assert_close([energy(remotely), gradient(remotely)], [energy(here), gradient(here)], rtol=1e-4)

    def samples(place):
        sampler = numpyro.infer.MCMC(
            numpyro.infer.NUTS(model, max_tree_depth=2), num_warmup=3, num_samples=3, progress_bar=False
        )
        sampler.run(jax.random.key(1), place)
        return sampler.get_samples()["weights"]

    assert_close(samples(remotely), samples(here), rtol=1e-3, atol=1e-3)
    wait_until_nobody_takes_part()
