"""State of modules on another worker: batch statistics and random generators, changed by calls as flax changes them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from helpers.data import assert_close
from helpers.worlds import last, on_worker0

import jdistgrad as jd
from jdistgrad.modules.function import RemoteModule

NOT_PARAMETERS = nnx.Not(nnx.Param)
ROUNDING = 1e-4  # of gradients of size 10, through a variance that flax computes from squares
X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)


def distance(function, x):
    return jnp.sum((function(x) - jnp.arange(3.0)) ** 2)


class Trained(nnx.Module):
    """A module whose statistics and random generator change with each call in training mode."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 3, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(3, momentum=0.7, rngs=rngs)
        self.drop = nnx.Dropout(0.4, rngs=rngs)

    def __call__(self, x, *, scale=1.0):
        return self.drop(self.norm(scale * self.first(x)))


class Normalizing(nn.Module):
    @nn.compact
    def __call__(self, x, *, train=False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.7)(nn.Dense(3, use_bias=False)(x))
        return nn.Dropout(0.4, deterministic=not train)(x)


class Fails(nnx.Module):
    def __init__(self, rngs):
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, *, fail=False):
        self.count[...] = self.count[...] + 1
        if fail:
            raise RuntimeError("no result")
        return x * self.count[...]


def state_of(local):
    return nnx.to_pure_dict(nnx.state(local, NOT_PARAMETERS))


def same_state(remote, local):
    found, expected = (jax.tree.map(plain, one) for one in (remote.state.to_here(), state_of(local)))
    assert_close(found, expected)


def plain(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def staged_or_not(function, staged):
    return jd.jit(function) if staged else function


both = pytest.mark.parametrize("staged", [False, True], ids=["eager", "staged"])


@both
@on_worker0
def test_an_nnx_module_in_training_is_the_serial_one(big_world, staged):
    local, remote = Trained(rngs=nnx.Rngs(3)), RemoteModule(last(), Trained, rng=3)
    step = staged_or_not(jd.value_and_grad(distance), staged)
    for turn in range(3):
        with jd.context():
            loss, by_module = step(remote, X + turn)
            found = by_module.parameters.to_here()
        expected, gradients = nnx.value_and_grad(distance)(local, X + turn)
        assert_close((loss, found), (expected, nnx.to_pure_dict(gradients)), atol=ROUNDING)
        same_state(remote, local)


@on_worker0
def test_evaluation_changes_nothing_and_training_goes_on_after_it(big_world):
    local, remote = Trained(rngs=nnx.Rngs(2)), RemoteModule(last(), Trained, rng=2)
    call = jd.jit(lambda module, x: module(x))
    for mode in ("train", "eval", "train"):
        getattr(local, mode)()
        getattr(remote, mode)()
        for _ in range(2):
            assert_close(call(remote, X), local(X))
            same_state(remote, local)


@both
@on_worker0
def test_a_linen_module_changes_the_collections_named_mutable(big_world, staged):
    module, key = Normalizing(), jax.random.key(5)
    variables = module.init(jax.random.key(3), X)
    remote = RemoteModule(last(), module, (X,), rng=3)

    def loss(module, x):
        settings = {"train": True, "mutable": ["batch_stats"], "rngs": {"dropout": key}}
        return distance(lambda x: module(x, **settings), x)

    def serial(params, stats, x):
        settings = {"train": True, "mutable": ["batch_stats"], "rngs": {"dropout": key}}
        y, changed = module.apply({"params": params, "batch_stats": stats}, x, **settings)
        return distance(lambda _: y, x), changed["batch_stats"]

    step, stats = staged_or_not(jd.value_and_grad(loss), staged), variables["batch_stats"]
    for turn in range(3):
        with jd.context():
            value, by_module = step(remote, X + turn)
            found = value, by_module.parameters.to_here()
        (value, stats), gradients = jax.value_and_grad(serial, has_aux=True)(variables["params"], stats, X + turn)
        assert_close(found, (value, gradients), atol=ROUNDING)
        assert_close(remote.state.to_here()["batch_stats"], stats)
    assert_close(remote(X), module.apply(variables | {"batch_stats": stats}, X))
    assert_close(remote.state.to_here()["batch_stats"], stats)


def slow_identity(x):
    return jnp.linalg.inv(jnp.eye(300))[0, 0] * x


@both
@on_worker0
def test_calls_in_one_step_follow_each_other_in_the_order_of_the_program(big_world, staged):
    """The first call waits for another worker; the second could start at once, but sees the state after the first."""
    local, remote = Trained(rngs=nnx.Rngs(4)), RemoteModule(last(), Trained, rng=4)

    def loss(module, x, before):
        late = module(before(x))
        return distance(lambda x: late, x) + 3 * distance(module, x + 1)

    def asked(x):
        return jd.rpc_sync(1, slow_identity, args=(x,))

    step = staged_or_not(jd.value_and_grad(lambda module, x: loss(module, x, asked)), staged)
    for turn in range(3):
        with jd.context():
            value, by_module = step(remote, X + turn)
            found = value, by_module.parameters.to_here()
        value, gradients = nnx.value_and_grad(lambda m, x: loss(m, x, slow_identity))(local, X + turn)
        assert_close(found, (value, nnx.to_pure_dict(gradients)), rtol=1e-4, atol=10 * ROUNDING)
        same_state(remote, local)


@on_worker0
def test_calls_in_a_loop_and_beside_it_follow_the_program(big_world):
    remote = RemoteModule(last(), Fails)

    def program(xs, module):
        before = module(xs[0])
        _, during = jax.lax.scan(lambda _, x: (None, module(x)), None, xs)
        return before, during, module(xs[0] * 1)

    step = jd.jit(program)
    for turn in range(4):
        found = jnp.hstack(step(jnp.ones(3), remote))
        np.testing.assert_array_equal(found, 5 * turn + np.arange(1, 6))


@on_worker0
def test_a_call_whose_result_is_not_used_changes_state_in_a_staged_step(big_world):
    remote = RemoteModule(last(), Fails)

    def program(x, module):
        module(x + 1)
        return module(x)

    np.testing.assert_array_equal(jd.jit(program)(jnp.ones(2), remote), 2)


@on_worker0
def test_calls_that_do_not_wait_for_each_other_take_turns_and_one_that_fails_changes_nothing(big_world):
    remote = RemoteModule(last(), Fails)
    futures = [remote.rpc_async(jnp.ones(())) for _ in range(20)]
    assert sorted(int(one.result()) for one in futures) == list(range(1, 21))
    with pytest.raises(RuntimeError):
        remote(X, fail=True)
    with pytest.raises(RuntimeError), jd.context():
        jd.grad(lambda x: jnp.sum(remote(x, fail=True)))(X)
    np.testing.assert_array_equal(remote.state.to_here()["count"], 20)


class Growing(nn.Module):
    @nn.compact
    def __call__(self, x, *, more=False):
        self.variable("memory", "one", jnp.zeros, ())
        if more:
            self.variable("memory", "two", jnp.zeros, ())
        return x


@on_worker0
def test_variables_that_a_later_call_makes_are_refused(big_world):
    remote = RemoteModule(last(), Growing(), (X,))
    assert_close(remote(X, mutable=["memory"]), X)
    with pytest.raises(ValueError):
        remote(X, more=True, mutable=["memory"])


@both
@on_worker0
def test_derivatives_of_any_order_are_of_the_call_that_was_made(big_world, staged):
    local, remote = Trained(rngs=nnx.Rngs(6)), RemoteModule(last(), Trained, rng=6)
    graph, state = nnx.split(local)

    def apply(x):
        return nnx.merge(graph, state, copy=True)(x)

    def twice(apply, x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(apply(x)) ** 2))(x) ** 2)

    def along(apply, x):
        return jax.jvp(lambda x: jnp.sin(apply(x)), (x,), (jnp.cos(x),))[1]

    def mixed(apply, x):
        return jax.grad(lambda x: jnp.sum(along(apply, x) ** 2))(x)

    for step, serial, rounding in (
        (jd.value_and_grad(lambda x, remote: twice(remote, x)), jax.value_and_grad(twice, 1), ROUNDING),
        (lambda x, remote: along(remote, x), along, 10 * ROUNDING),
        (lambda x, remote: mixed(remote, x), mixed, 10 * ROUNDING),
    ):
        with jd.context():
            found = staged_or_not(step, staged)(X, remote)
        assert_close(found, serial(apply, X), rtol=1e-4, atol=rounding)
        local = nnx.merge(graph, state)
        local(X)
        graph, state = nnx.split(local)
        same_state(remote, local)


def call_module(module, x):
    return module(x)


@on_worker0
def test_a_batch_of_calls_and_a_copy_elsewhere_change_no_state(big_world):
    remote = RemoteModule(last(), Trained)
    with pytest.raises(Exception, match=r"Trained changes its state .* call it in eval mode"):
        jax.vmap(remote)(X[:, None])
    with pytest.raises(TypeError):
        jd.rpc_sync(1, call_module, args=(remote, X))
    remote.eval()
    assert_close(jax.vmap(remote)(X[:, None])[:, 0], remote(X))
    assert_close(jd.rpc_sync(1, call_module, args=(remote, X)), remote(X))


@on_worker0
def test_training_goes_on_from_saved_variables(big_world):
    remote = RemoteModule(last(), Trained, rng=7)
    remote(X)
    saved = remote.variables()
    expected = [remote(X + 1), remote(X + 2)]
    remote.restore(jax.tree.map(lambda leaf: leaf, saved))
    assert_close([remote(X + 1), remote(X + 2)], expected)
    with pytest.raises(ValueError):
        remote.restore({"parameters": {}, "state": saved["state"]})
    same = RemoteModule(0, Trained, rng=8)
    same.restore(saved)
    assert_close([same(X + 1), same(X + 2)], expected)


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.scale = nnx.Linear(4, 3, rngs=rngs), 1.0

    def __call__(self, x):
        return self.inner(x) * self.scale


@on_worker0
def test_an_attribute_that_one_mode_sets_stays_in_the_next(world):
    local, remote = Scaled(nnx.Rngs(0)), RemoteModule(last(), Scaled)
    for module in (local, remote):
        module.train(scale=3.0)
        module.eval()
    assert_close(remote(X), local(X))
    for module in (local, remote):
        module.train(scale=-2.0)
    assert_close(remote(X), local(X))


@on_worker0
def test_what_flax_would_not_change_is_named(big_world):
    remote = RemoteModule(last(), Normalizing(), (X,))
    with pytest.raises(TypeError):
        remote.train()
    with pytest.raises(ValueError):
        RemoteModule(last(), Sown(), (X,))(X, mutable=["intermediates"])


class Sown(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "seen", x)
        return x


class Inside(Trained):
    """A module whose body is in a transformation of flax's, which gives back all its variables as other objects."""

    def __init__(self, transformation, rngs):
        super().__init__(rngs)
        self.transformation = transformation

    def __call__(self, x, *, rescales=False):
        def body(module, x):
            if rescales:
                module.first.kernel[...] = module.first.kernel[...] / 2
            return Trained.__call__(module, x)

        return self.transformation(body)(self, x)


@pytest.mark.parametrize(("transformation", "staged"), [(nnx.remat, False), (nnx.jit, True)], ids=["remat", "jit"])
@on_worker0
def test_a_module_inside_a_transformation_of_flax_is_the_serial_one(big_world, transformation, staged):
    factory = functools.partial(Inside, transformation)
    local, remote = factory(rngs=nnx.Rngs(3)), RemoteModule(last(), factory, rng=3)
    with jd.context():
        loss, gradient = staged_or_not(jd.value_and_grad(distance), staged)(remote, X)
        expected, local_gradient = nnx.value_and_grad(distance)(local, X)
        assert_close(loss, expected, ROUNDING)
        assert_close(gradient.parameters.to_here(), nnx.to_pure_dict(local_gradient), ROUNDING)
    same_state(remote, local)
    with pytest.raises(ValueError):
        remote(X, rescales=True)
