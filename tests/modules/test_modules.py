"""Flax modules whose parameters live on another worker, compared with the same modules in one process."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from helpers.data import assert_close
from helpers.models import Both, Encoder, Line, Normalized, X, squares, take_traces
from helpers.worlds import last, on_worker0

import jdistgrad as jd
from jdistgrad.autograd.callee.pullbacks import STATICS_COMPILED
from jdistgrad.modules import flax_modules
from jdistgrad.modules.function import RemoteModule


def serial(module, *args, seed=3):
    """Return a linen module's parameters, and a function that applies the module to parameters and inputs."""
    variables = module.init(jax.random.key(seed), *args)
    rest = {name: value for name, value in variables.items() if name != "params"}
    return variables["params"], lambda params, x, **kwargs: module.apply({"params": params, **rest}, x, **kwargs)


def power(exponent):
    return lambda x: x**exponent


GAUSSIAN = nn.Dense(2, kernel_init=nn.initializers.variance_scaling(2.0, "fan_in", "normal"))


@pytest.mark.parametrize(
    ("module", "staged"),
    [
        (Encoder(3), True),
        (Encoder(3, (nn.Dense(5, use_bias=False), nn.relu)), False),
        (nn.Sequential([nn.Dense(5, kernel_init=nn.initializers.normal(0.5)), power(2), GAUSSIAN]), True),
        (Normalized(), False),
    ],
    ids=["compact", "layers", "made by a call", "normalized"],
)
@on_worker0
def test_a_linen_module_is_the_serial_one(big_world, module, staged):
    params, apply = serial(module, X)
    remote = RemoteModule(last(), module, (X,), rng=3)
    step = jd.value_and_grad(squares, argnums=(0, 1))
    step = jd.jit(step) if staged else step
    with jd.context():
        loss, (by_module, by_x) = step(remote, X)
        found = loss, (by_module.parameters.to_here(), by_x)
    assert_close(found, jax.value_and_grad(lambda p, x: squares(lambda x: apply(p, x), x), (0, 1))(params, X))


@pytest.mark.parametrize(
    ("make", "staged"), [(functools.partial(Both, 4, outputs=3), False), (Line, True)], ids=["partial", "class"]
)
@on_worker0
def test_an_nnx_module_is_the_serial_one(big_world, make, staged):
    local = make(rngs=nnx.Rngs(3))
    remote = RemoteModule(last(), make, rng=3)
    step = jd.value_and_grad(squares)
    step = jd.jit(step) if staged else step
    with jd.context():
        loss, by_module = step(remote, X)
        found = by_module.parameters.to_here()
    expected, gradients = nnx.value_and_grad(squares)(local, X)
    assert_close((loss, found), (expected, nnx.to_pure_dict(gradients)))
    np.testing.assert_allclose(remote(X * 2), local(X * 2), rtol=1e-6)


@pytest.mark.parametrize("layers", [(), (GAUSSIAN,)], ids=["plain", "made by a call"])
@on_worker0
def test_the_worker_traces_a_module_once_for_each_shape(big_world, layers):
    remote = RemoteModule(last(), Encoder(6, layers), (X,))
    jd.rpc_sync(last(), take_traces, args=(last(),))
    for _ in range(3):
        for x in (X, X[:1]):
            remote(x)
    assert jd.rpc_sync(last(), take_traces, args=(last(),)) == [(2, 4), (1, 4)]
    for _ in range(3):
        again = RemoteModule(last(), Encoder(6, layers), (X,), rng=1)
        jd.rpc_sync(last(), take_traces, args=(last(),))  # forget the traces of init
        with jd.context():
            jd.value_and_grad(squares)(again, X)
    assert jd.rpc_sync(last(), take_traces, args=(last(),)) == []


class Adaptable(nn.Module):
    def setup(self):
        self.dense = nn.Dense(3)

    def __call__(self, x, activation=nn.tanh, dtype=jnp.float32):
        return activation(self.dense(x)).astype(dtype)

    def linear(self, x):
        return self.dense(x)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation": nn.relu, "dtype": jnp.bfloat16},
        {"activation": jnp.sin, "dtype": np.dtype("float16")},
        {"method": Adaptable.linear},
        {"method": "linear"},
    ],
    ids=["custom_jvp and scalar type", "jitted and dtype", "method", "name"],
)
@on_worker0
def test_functions_and_dtypes_are_settings_of_a_call(big_world, settings):
    params, apply = serial(Adaptable(), X)
    remote = RemoteModule(last(), Adaptable(), (X,), rng=3)
    with jd.context():
        loss, by_module = jd.value_and_grad(lambda m: jnp.sum(m(X, **settings)))(remote)
        found = loss, by_module.parameters.to_here()
    assert_close(found, jax.value_and_grad(lambda p: jnp.sum(apply(p, X, **settings)))(params), atol=1e-4)


class Stepped(nn.Module):
    @nn.compact
    def __call__(self, x, step):
        return nn.Dense(3)(x) * step


def test_arguments_that_keep_changing_are_not_compiled_for():
    """The number of a step would have the module compiled in each step."""
    apply = flax_modules.LinenApply(flax_modules.blueprint(Stepped()), stateful=False)
    parameters, _ = apply.init(3, (X, 1))
    for step in (*range(2 * STATICS_COMPILED), 0.5, 1.5):
        found, changed = jax.value_and_grad(lambda p, step=step: jnp.sum(apply(p, X, step)))(parameters)
        assert_close(found, step * jnp.sum(apply(parameters, X, 1)))
        assert_close(changed["Dense_0"]["bias"], jnp.full(3, step * len(X), jnp.float32))
    assert apply._compiled.cache_info().misses == STATICS_COMPILED + 1  # both floats are arguments of one program


def test_modules_on_several_workers_train_as_one(big_world):
    def loss_fn(modules, x):
        for module in modules:
            x = module(x)
        return jnp.mean((x - 1) ** 2)

    def body():
        layers = [nn.Dense(5), nn.Dense(4), nn.Dense(3)]
        places = [rank % jd.world_size() for rank in (1, 2, 0)]
        inputs = [X, jnp.zeros((2, 5)), jnp.zeros((2, 4))]
        remote = [RemoteModule(to, layer, (x,)) for to, layer, x in zip(places, layers, inputs, strict=True)]
        tx = optax.adam(0.1)
        optimizer = jd.DistributedOptimizer(tx, [module.parameters for module in remote])
        step = jd.jit(jd.value_and_grad(loss_fn))
        losses = []
        for _ in range(6):
            with jd.context() as ctx:
                losses.append(float(step(remote, X)[0]))
                optimizer.step(ctx)
        np.testing.assert_allclose(losses, serial_losses(layers, inputs, tx), rtol=1e-4)
        assert losses[-1] < losses[0] / 2

    def serial_losses(layers, inputs, tx):
        params = [layer.init(jax.random.key(0), x)["params"] for layer, x in zip(layers, inputs, strict=True)]

        def loss(params):
            functions = zip(layers, params, strict=True)
            return loss_fn([lambda x, one=one: one[0].apply({"params": one[1]}, x) for one in functions], X)

        state, losses = tx.init(params), []
        for _ in range(6):
            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(value))
        return losses

    big_world.drive(body)
