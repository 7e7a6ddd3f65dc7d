"""Functions and flax modules whose parameters live on another worker."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import jdistgrad as jd
from jdistgrad.modules import linen, nnx as our_nnx
from jdistgrad.modules.blueprint import Blueprint
from jdistgrad.modules.function import RemoteFunction
from jdistgrad.modules.module import RemoteModule
from jdistgrad.rpc.current import current_worker

traced = []


class Encoder(nn.Module):
    """Says when it is traced."""

    width: int
    layers: tuple = ()

    @nn.compact
    def __call__(self, x, *, double=False):
        traced.append(x.shape)
        for layer in self.layers:
            x = layer(x)
        y = nn.tanh(nn.Dense(self.width)(x))
        return 2 * y if double else y


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(3)(x))
        return nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x)


class Both(nnx.Module):
    """Parameters, statistics and a random generator."""

    def __init__(self, inputs, outputs, *, rngs):
        self.first = nnx.Linear(inputs, outputs, rngs=rngs)
        self.norm = nnx.BatchNorm(outputs, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x, double=False):
        y = self.drop(self.norm(jnp.tanh(self.first(x))))
        return 2 * y if double else y


class Broken(nn.Module):
    @nn.compact
    def __call__(self, x):
        raise RuntimeError("no such layer")


X = jnp.linspace(-1, 1, 8).reshape(2, 4)


def last():
    return jd.world_size() - 1


def init_line(slope):
    return {"slope": jnp.float32(slope), "offset": jnp.ones(4)}


def line(params, x, *, scale=1.0):
    return scale * params["slope"] * x + params["offset"]


compiled_line = jax.jit(line)


def assert_trees_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def squares(function, x):
    return jnp.sum(function(x) ** 2)


@pytest.mark.parametrize("apply", [line, compiled_line])
def test_a_function_beside_its_parameters(big_world, apply):
    def body():
        function = RemoteFunction(last(), init_line, apply, args=(2.0,))
        local = init_line(2.0)
        assert function.owner.rank == last()
        np.testing.assert_allclose(function(X, scale=3.0), line(local, X, scale=3.0), rtol=1e-6)
        np.testing.assert_allclose(function.rpc_async(X).result(), line(local, X), rtol=1e-6)
        kept = function.remote(X)
        assert kept.owner == function.owner
        np.testing.assert_allclose(kept.to_here(), line(local, X), rtol=1e-6)

    big_world.drive(body)


@pytest.mark.parametrize("apply", [line, compiled_line])
@pytest.mark.parametrize("staged", [False, True])
def test_gradients_of_a_functions_parameters_stay_with_them(big_world, apply, staged):
    def body():
        function = RemoteFunction(last(), init_line, apply, args=(2.0,))
        step = jd.value_and_grad(squares, argnums=(0, 1))
        step = jd.jit(step) if staged else step
        with jd.context():
            loss, (by_function, by_x) = step(function, X)
            assert by_function.parameters.owner == function.owner
            found = by_function.parameters.to_here()
        expected = jax.value_and_grad(lambda p, x: jnp.sum(line(p, x) ** 2), (0, 1))(init_line(2.0), X)
        assert_trees_close((loss, (found, by_x)), expected)

    big_world.drive(body)


def test_every_way_of_calling_has_the_derivative(big_world):
    def loss(function, x):
        return jnp.sum(function.rpc_async(x).result() * function.remote(x).to_here() * function(x))

    def body():
        function = RemoteFunction(last(), init_line, compiled_line, args=(2.0,))
        with jd.context():
            found = jd.grad(loss)(function, X).parameters.to_here()
        assert_trees_close(found, jax.grad(lambda p: jnp.sum(line(p, X) ** 3))(init_line(2.0)))

    big_world.drive(body)


def test_parameters_that_exist_and_others_in_their_place(big_world):
    def body():
        mine = jd.RRef(init_line(5.0))
        function = RemoteFunction(0, mine, line)
        assert function.parameters is mine
        other = function.with_parameters(jd.remote(last(), init_line, args=(7.0,)))
        np.testing.assert_allclose(other(X) - function(X), 2 * X, rtol=1e-5)
        assert other.owner.rank == last()

    big_world.drive(body)


def call_it(function, x):
    return function(x), isinstance(function.parameters, dict)


def test_as_an_argument_it_arrives_with_its_parameters(big_world):
    def body():
        for function in (
            RemoteFunction(last(), init_line, line, args=(2.0,)),
            RemoteModule(last(), Normalized(), (X,)),
        ):
            there, at_home = jd.rpc_sync(last(), call_it, args=(function, X))
            np.testing.assert_allclose(there, function(X), rtol=1e-6)
            assert at_home

    big_world.drive(body)


# flax.


def serial(module, *args, seed=3):
    """A linen module's parameters, and its result as a function of them."""
    variables = module.init(jax.random.key(seed), *args)
    rest = {name: value for name, value in variables.items() if name != "params"}
    return variables["params"], lambda params, x, **kwargs: module.apply({"params": params, **rest}, x, **kwargs)


@pytest.mark.parametrize(
    ("module", "staged"),
    [
        (Encoder(3), True),
        (Encoder(3, (nn.Dense(5, use_bias=False), nn.relu)), False),
        (nn.Sequential([nn.Dense(5, kernel_init=nn.initializers.ones), jax.nn.relu, nn.Dense(2)]), True),
        (Normalized(), False),
    ],
    ids=["compact", "layers", "sequential", "normalized"],
)
def test_a_linen_module_is_the_serial_one(big_world, module, staged):
    def body():
        params, apply = serial(module, X)
        remote = RemoteModule(last(), module, (X,), rng=3)
        step = jd.value_and_grad(squares, argnums=(0, 1))
        step = jd.jit(step) if staged else step
        with jd.context():
            loss, (by_module, by_x) = step(remote, X)
            found = loss, (by_module.parameters.to_here(), by_x)
        assert_trees_close(found, jax.value_and_grad(lambda p, x: squares(lambda x: apply(p, x), x), (0, 1))(params, X))

    big_world.drive(body)


@pytest.mark.parametrize("staged", [False, True])
def test_an_nnx_module_is_the_serial_one(big_world, staged):
    def body():
        make = functools.partial(Both, 4, outputs=3)
        local = make(rngs=nnx.Rngs(3))
        remote = RemoteModule(last(), make, rng=3)
        step = jd.value_and_grad(squares)
        step = jd.jit(step) if staged else step
        with jd.context():
            loss, by_module = step(remote, X)
            found = by_module.parameters.to_here()
        expected, gradients = nnx.value_and_grad(squares)(local, X)
        assert_trees_close((loss, found), (expected, nnx.to_pure_dict(gradients)))
        np.testing.assert_allclose(remote(X, double=True), 2 * local(X), rtol=1e-6)

    big_world.drive(body)


def count_traces(rank):
    found = list(traced)
    traced.clear()
    return found


def test_the_worker_traces_a_module_once_for_each_shape(big_world):
    def body():
        remote = RemoteModule(last(), Encoder(6), (X,))
        jd.rpc_sync(last(), count_traces, args=(last(),))
        for _ in range(3):
            for x in (X, X[:1]):
                remote(x)
        assert jd.rpc_sync(last(), count_traces, args=(last(),)) == [(2, 4), (1, 4)]
        for _ in range(3):
            again = RemoteModule(last(), Encoder(6), (X,), rng=1)
            jd.rpc_sync(last(), count_traces, args=(last(),))  # init's
            with jd.context():
                jd.value_and_grad(squares)(again, X)
        assert jd.rpc_sync(last(), count_traces, args=(last(),)) == []

    big_world.drive(body)


def test_arguments_that_are_no_arrays(big_world):
    def body():
        remote = RemoteModule(last(), Encoder(2), (X,))
        np.testing.assert_allclose(remote(X, double=True), 2 * remote(X), rtol=1e-6)
        once, twice = (
            jd.grad(lambda m, double=double: jnp.sum(m(X, double=double)))(remote).parameters.to_here()
            for double in (False, True)
        )
        assert_trees_close(twice, jax.tree.map(lambda leaf: 2 * leaf, once))

    big_world.drive(body)


def test_random_generators_travel_with_the_call(big_world):
    def body():
        remote = RemoteModule(last(), Normalized(), (X,))
        key = jax.random.key(1)
        dropped = remote(X, rngs={"dropout": key})
        assert (np.asarray(dropped) == 0).any()
        np.testing.assert_array_equal(dropped, remote(X, rngs={"dropout": key}))

    big_world.drive(body)


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
        for _ in range(10):
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
        for _ in range(10):
            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(value))
        return losses

    big_world.drive(body)


def test_nothing_stays_behind_when_a_module_is_dropped(big_world):
    def body():
        before = jd.rpc_sync(last(), owned_values)
        remote = RemoteModule(last(), Normalized(), (X,))
        with jd.context():
            jd.value_and_grad(squares)(remote, X)
        assert jd.rpc_sync(last(), owned_values) >= before + 2
        del remote

    big_world.drive(body)


def owned_values():
    return len(current_worker().owned)


# Bad input.


def test_what_fails_while_a_module_is_made_is_said_at_once(big_world):
    def body():
        with pytest.raises(RuntimeError, match="no such layer"):
            RemoteModule(last(), Broken(), (X,))
        with pytest.raises(TypeError, match="init_line"):
            RemoteFunction(last(), init_line, line, args=(1, 2))

    big_world.drive(body)


def test_what_is_no_module_is_refused(big_world):
    def body():
        with pytest.raises(TypeError, match=r"takes a flax.linen module.*not 3"):
            RemoteModule(last(), 3)
        with pytest.raises(TypeError, match=r"takes a flax.linen module"):
            RemoteModule(last(), Encoder)
        with pytest.raises(TypeError, match=r"pass what makes it"):
            RemoteModule(last(), Both(4, 3, rngs=nnx.Rngs(0)))
        with pytest.raises(TypeError, match=r"Encoder holds something that cannot be hashed"):
            RemoteModule(last(), Encoder(3, np.ones(3)), (X,))

    big_world.drive(body)


# Blueprints.


@pytest.mark.parametrize("layers", [(nn.Dense(3), nn.relu), [nn.Dense(3)], {"a": nn.Dense(3)}])
def test_a_blueprint_builds_an_equal_module(layers):
    module, made = Encoder(2, layers), linen.blueprint_of(Encoder(2, layers))
    assert hash(made) == hash(linen.blueprint_of(module))
    assert made == linen.blueprint_of(module)
    assert made != linen.blueprint_of(Encoder(3, layers))
    assert made.build() == module


def test_only_what_was_given_is_in_a_blueprint():
    assert linen.blueprint_of(nn.Dense(3)) == Blueprint(nn.Dense, (), (("features", 3),))
    assert our_nnx.blueprint_of(functools.partial(Both, 4, outputs=2)).label == "Both"
