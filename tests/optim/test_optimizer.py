"""Optimizers of parameters that live on other workers, compared with optax on one worker."""

import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.programs import X, Y, affine, holding, make_params, references
from helpers.training import distributed_loss, trained_serially, values
from helpers.transformations import (
    NOT_HERE,
    PARAMS,
    REFUSED,
    TRANSFORMATIONS,
    gradients,
    marks_of,
    potential,
    with_extra,
)
from helpers.worlds import last, on_worker0

import jdistgrad as jd
from jdistgrad.optim.stepping import Stepping, StepState
from jdistgrad.optim.values import Value, ValueForm


def make_mixed(seed):
    return {**make_params(seed), "steps": jnp.int32(7), "name": "mixed"}


def only_floats(params, x):
    return affine({key: params[key] for key in "wb"}, x)


def poison(params):
    return {"w": params["w"] * jnp.nan, "b": params["b"]}


def train(optimizer, refs, steps, loss=distributed_loss):
    step = jd.jit(jd.value_and_grad(loss, argnums=(0, 1)))
    for k in range(steps):
        with jd.context() as ctx:
            value, _ = step(*refs, X + k, Y)
            optimizer.step(ctx)
    return value


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.05, momentum=0.9),
        optax.adamw(optax.exponential_decay(1e-2, 2, 0.5), weight_decay=1e-2),
        optax.inject_hyperparams(optax.rmsprop)(learning_rate=1e-2),
        optax.MultiSteps(optax.adam(1e-2), 2),
    ],
    ids=["sgd", "adamw with a schedule", "injected", "every second step"],
)
@on_worker0
def test_equals_the_same_transformation_on_one_worker(world, tx):
    refs = references()
    train(jd.DistributedOptimizer(tx, refs), refs, 5)
    assert_close(values(refs), trained_serially(tx, 5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [pytest.param(one, marks=marks_of(one)) for one in TRANSFORMATIONS])
@on_worker0
def test_each_of_optax_is_what_it_is_in_one_process_or_refused(big_world, name):
    tx, extra = with_extra(name)
    params = list(PARAMS.values())
    refs = [jd.put(owner, one) for owner, one in zip((1, 2, 1, 0), params, strict=True)]
    try:
        found, state = params, tx.init(params)
        for k in range(4):
            updates, state = tx.update(gradients(found, k), state, found, **extra)
            found = optax.apply_updates(found, updates)
    except Exception:
        assert name in NOT_HERE
        return

    def train(optimizer):
        @jd.jit
        def step(refs, k):
            optimizer.step(jd.grad(loss_of)(refs, k), **extra)

        for k in range(4):
            step(refs, jnp.float32(k))

    if name in REFUSED:
        with pytest.raises(ValueError, match=r"takes arrays of ranks \[0, 1, 2\] together"):
            train(jd.DistributedOptimizer(tx, refs))
    else:
        train(jd.DistributedOptimizer(tx, refs))
        found = jax.tree.map(lambda one, like: one.reshape(like.shape), found, params)  # one of them adds a dimension
        assert_close(jd.get(refs), found, rtol=1e-3, atol=1e-4)


def loss_of(refs, k):
    return sum(jd.on(ref.owner, potential)(ref, k) for ref in refs)


@on_worker0
def test_steps_of_several_rounds_follow_each_other(big_world):
    """What a round of a step reads is what the step before has left, also if no value depends on another."""
    params, tx = (
        [jnp.linspace(0, 1, 3), jnp.ones((2, 2))],
        optax.chain(optax.trace(0.9), optax.clip_by_global_norm(0.5)),
    )
    refs = [jd.put(owner, one) for owner, one in zip((1, 2), params, strict=True)]
    optimizer, state = jd.DistributedOptimizer(tx, refs), tx.init(params)

    @jd.jit
    def step(refs, k):
        first, second = jd.grad(loss_of)(refs, k), jd.grad(loss_of)(refs, k + 1)
        optimizer.step(first)
        optimizer.step(second)

    for k in range(3):
        step(refs, jnp.float32(k))
        for gradient in [gradients(params, k), gradients(params, k + 1)]:
            updates, state = tx.update(gradient, state)
            params = optax.apply_updates(params, updates)
    assert_close(jd.get(refs), params)


@on_worker0
def test_a_state_may_widen_and_is_one_of_arrays(big_world):
    params = [{"w": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones(3)}, jnp.linspace(0, 1, 3)]
    tx = optax.inject_hyperparams(optax.contrib.prodigy)(learning_rate=optax.constant_schedule(0.5))
    refs = [jd.put(owner, one) for owner, one in zip((0, 1), params, strict=True)]
    optimizer, state = jd.DistributedOptimizer(tx, refs), tx.init(params)
    step = jd.jit(lambda refs, k: optimizer.step(jd.grad(loss_of)(refs, k)))
    for k in range(3):
        step(refs, jnp.float32(k))
        updates, state = tx.update(gradients(params, k), state, params)
        params = optax.apply_updates(params, updates)
    assert_close(jd.get(refs), params, rtol=0.02)
    found = optimizer.state()["state"]
    optimizer.restore(jax.tree.map(np.asarray, optimizer.state()))
    assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(lambda leaf: jnp.asarray(leaf).dtype, state)


@on_worker0
def test_an_owner_of_integers_has_a_part_of_the_state(big_world):
    refs = [jd.put(0, {"w": jnp.ones(3)}), jd.put(1, {"table": jnp.arange(3)}), jd.put(2, {"w": jnp.ones(2)})]
    optimizer = jd.DistributedOptimizer(optax.adam(0.1), refs)
    state = optimizer.state()
    assert int(state["state"][0].count) == 0
    optimizer.restore(jax.tree.map(lambda leaf: leaf + 1, state))
    assert_close(jd.get(refs), [{"w": jnp.full(3, 2.0)}, {"table": jnp.arange(3) + 1}, {"w": jnp.full(2, 2.0)}])
    assert int(optimizer.state()["state"][0].count) == 1


@pytest.mark.parametrize("norm", [0.5, 1e6], ids=["below the gradients'", "above"])
@on_worker0
def test_clipping_by_the_norm_over_all_owners(world, norm):
    tx = optax.chain(optax.clip_by_global_norm(norm), optax.sgd(0.1))
    refs = references()
    train(jd.DistributedOptimizer(optax.sgd(0.1), refs, max_global_norm=norm), refs, 4)
    assert_close(values(refs), trained_serially(tx, 4))


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("gradient", "square"),
    [([3 + 4j], 25), (np.full(4, 300, "float16"), 360_000), (np.full(2, 3, jnp.float8_e4m3fn), 18), ([np.inf], np.inf)],
    ids=["complex", "float16", "float8", "infinity"],
)
def test_norms_of_gradients_of_other_dtypes(gradient, square):
    gradient = [jnp.asarray(gradient)]
    zero = jax.tree.map(jnp.zeros_like, gradient)
    stepping = Stepping(optax.identity(), 2.0, {"worker": [0]})
    clipped, state = stepping.update(gradient, stepping.init(zero), zero)
    with np.errstate(invalid="ignore"):
        expected = np.asarray(gradient[0], complex) * 2 / np.sqrt(square)
    assert_close(clipped[0].astype(complex), expected, rtol=0.05)
    assert state.finite == [np.isfinite(square)]


@pytest.mark.parametrize("refuse", [False, True], ids=["any gradients", "finite gradients"])
@on_worker0
def test_an_infinite_norm_clips_nothing(world, refuse):
    refs = references()
    train(jd.DistributedOptimizer(optax.sgd(0.1), refs, max_global_norm=math.inf, refuse_nan=refuse), refs, 2)
    assert_close(values(refs), trained_serially(optax.sgd(0.1), 2))


@pytest.mark.one_process
def test_clipping_keeps_the_precision_of_the_values():
    with jax.enable_x64(True):
        ((clipped,), _) = Stepping(optax.identity(), 1 / 3, {}).update([jnp.ones(3)], StepState((), []), [jnp.zeros(3)])
        np.testing.assert_allclose(clipped, np.full(3, 3**-1.5), rtol=1e-15)


@on_worker0
def test_local_values_beside_remote_ones(world):
    refs = jd.remote(last(), make_params, args=(1,)), jd.RRef(make_params(2))
    tx = optax.adam(1e-2)
    train(jd.DistributedOptimizer(tx, refs), refs, 3)
    assert_close(refs[1].local_value(), trained_serially(tx, 3)[1])


@on_worker0
def test_leaves_that_are_no_floats_stay(world):
    params = jd.remote(last(), make_mixed, args=(1,))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [params])
    with jd.context() as ctx:
        jd.grad(lambda p: jd.rpc_sync(last(), only_floats, args=(p, X)).sum())(params)
        optimizer.step(ctx)
    found = params.to_here()
    assert (int(found["steps"]), found["name"]) == (7, "mixed")
    assert list(found) == ["w", "b", "steps", "name"]
    assert_close(found["b"], make_params(1)["b"] - 0.1)


def square_of_both(params, x):
    held = params["held"]
    return jnp.sum((jd.rpc_sync(held.owner, jnp.multiply, args=(held, x)) * params["w"]) ** 2)


@pytest.mark.parametrize(("tx", "norm"), [(optax.sgd(0.1), 0.5), (optax.adam(0.1), None)], ids=["sgd", "adam"])
@on_worker0
def test_references_that_a_value_holds_stay(world, tx, norm):
    """Their gradients are those of their own values, which another optimizer may step with."""
    inner, x = jd.remote(last(), jnp.ones, args=(3,)), jnp.linspace(0.5, 1, 3)
    outer = jd.remote(0, holding, args=(jd.by_reference(inner),))
    optimizer = jd.DistributedOptimizer(tx, [outer], max_global_norm=norm)
    w, state = jnp.arange(3.0), tx.init(jnp.arange(3.0))
    clip = optax.clip_by_global_norm(norm or math.inf)
    for _ in range(3):
        with jd.context() as ctx:
            jd.value_and_grad(lambda outer: jd.rpc_sync(outer.owner, square_of_both, args=(outer, x)))(outer)
            optimizer.step(ctx)
        gradient, _ = clip.update(jax.grad(lambda w: jnp.sum((x * w) ** 2))(w), clip.init(w))
        updates, state = tx.update(gradient, state)
        w = optax.apply_updates(w, updates)
    assert_close(outer.to_here()["w"], w)
    assert_close(outer.to_here()["held"].to_here(), np.ones(3))


@on_worker0
def test_several_trainers_share_parameters_without_losing_a_step(world):
    params = jd.remote(last(), make_params, args=(1,))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.125), [params])
    failures = []

    def trainer():
        try:
            for _ in range(10):
                with jd.context() as ctx:
                    jd.grad(lambda p: jd.rpc_sync(last(), affine, args=(p, X))[0])(params)
                    optimizer.step(ctx)
        except BaseException as error:
            failures.append(error)

    before = params.to_here()["b"][0]
    run_together(trainer, 4)
    assert failures == []
    assert_close(params.to_here()["b"][0], before - 40 * 0.125)


def run_together(target, count):
    import contextvars

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(target,)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@on_worker0
def test_trainers_on_other_workers_converge(big_world):
    """A parameter server with a trainer on every other worker: each trainer gets the optimizer as an argument."""
    params = jd.remote(last(), make_params, args=(1,))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.02), [params])
    trainers = range(jd.world_size() - 1)
    args = (jd.by_reference(params), jd.RRef(optimizer), 30)
    for future in [jd.rpc_async(k, fit, args=args) for k in trainers]:
        future.result()
    assert float(((affine(params.to_here(), X) - Y) ** 2).sum()) < 1e-3


def fit(params, optimizer, steps):
    for _ in range(steps):
        with jd.context() as ctx:
            jd.value_and_grad(lambda p: ((jd.rpc_sync(last(), affine, args=(p, X)) - Y) ** 2).sum())(params)
            optimizer.step(ctx)


def changing_values():
    """Yield values of one reference, one after the other, with what a step must leave of each beside float arrays."""
    one = {"w": jnp.ones(3), "steps": 1, "name": "a", "table": np.arange(3), "none": None}
    yield one
    yield one | {"w": jnp.arange(3)}
    yield one
    yield one | {"steps": 2, "table": np.arange(3)}
    yield one | {"w": jnp.zeros(3)}
    yield one | {"w": jnp.zeros(3, jnp.bfloat16)}
    yield one | {"w": np.ones(3)}
    yield one | {"w": 3, "steps": jnp.ones(2)}
    yield {"w": [jnp.ones(3), jnp.ones(2)]}
    yield {"w": jnp.ones(3), "inner": jd.RRef(jnp.ones(2))}
    yield {"w": jnp.zeros(3), "inner": jd.RRef(jnp.zeros(2))}
    yield (jnp.ones(()),)
    yield jnp.ones(2)
    yield jnp.zeros(2)


@pytest.mark.one_process
def test_values_are_taken_apart_alike_whatever_came_before():
    with jd.local_workers(1):
        form = ValueForm()
        for value in changing_values():
            for _ in range(2):
                found, expected = form.take_apart(value), Value.of(value)
                assert len(found.leaves) == len(expected.leaves)
                assert all(a is b for a, b in zip(found.leaves, expected.leaves, strict=True))
                assert found.tree == expected.tree
                whole = found.layout.fill(found.leaves)
                assert all(a is b for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(value), strict=True))
