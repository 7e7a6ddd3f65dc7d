"""Tracing and compiling of staged steps: once per shape, on the caller and on the callee."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest
from helpers.data import assert_close
from helpers.programs import X, mix
from helpers.worlds import last, on_worker0

import jdistgrad as jd
from jdistgrad.autograd.staged.rewriting import SMALL
from jdistgrad.rpc.worker import current_worker

pytestmark = pytest.mark.world(1, 3)

compilations = {"count": 0}


def count_compilations(event, *_, **__):
    if event.endswith("backend_compile_duration"):
        compilations["count"] += 1


def compiled_so_far():
    return current_worker().rank, compilations["count"]


@pytest.fixture
def counted():
    """Count the compilations of this process."""
    jax.monitoring.register_event_duration_secs_listener(count_compilations)
    yield
    jax.monitoring.clear_event_listeners()


@on_worker0
def test_alike_pieces_are_compiled_once(big_world, counted):
    step = jd.jit(lambda xs: sum(jd.rpc_sync(last(), mix, args=(x, x)).sum() * 3.5 for x in xs))
    xs = [X + k for k in range(12)]
    step(xs[:4])
    before = compilations["count"]
    found = step(xs)
    assert compilations["count"] == before
    assert_close(found, sum((mix(x, x) * 3.5).sum() for x in xs))


STEPS_THAT_CLOSE_OVER = {
    "here": lambda data: lambda x: (x + data).sum(),
    "in a call": lambda data: lambda x: jd.rpc_sync(last(), mix, args=(x, data * 2)).sum(),
    "in jit": lambda data: lambda x: jax.jit(lambda x: x + data)(x).sum(),
    "in a branch": lambda data: lambda x: jax.lax.cond(x[0] > 0, lambda x: (x * data).sum(), jnp.sum, x),
}


@pytest.mark.parametrize("make", STEPS_THAT_CLOSE_OVER.values(), ids=STEPS_THAT_CLOSE_OVER)
@on_worker0
def test_large_arrays_that_a_step_closes_over_live_as_long_as_the_step(world, make):
    data, gone = jnp.ones(SMALL), threading.Event()
    step, seen = jd.jit(make(data)), weakref.ref(data, lambda _: gone.set())
    step(data)
    del data
    gc.collect()
    assert seen() is not None
    del step
    gc.collect()
    assert gone.wait(60)  # the thread that has served the call may only now let its arguments go


def test_what_was_compiled_for_closed_worlds_is_forgotten():
    plans = []
    step = jd.jit(lambda x: jd.rpc_sync(2, mix, args=(x, x)).sum())
    for _ in range(3):
        with jd.local_workers(3):
            assert_close(step(X), mix(X, X).sum())
            plans.append(weakref.ref(step.plan(X)))
    gc.collect()
    assert [plan() is None for plan in plans] == [True, True, False]


@on_worker0
def test_retraced_only_on_new_shapes(world):
    traced = []

    def step(x):
        traced.append(x.shape)
        return jd.rpc_sync(last(), jnp.sin, args=(x,)).sum()

    staged = jd.jit(step)
    for x in (X, X + 1, jnp.ones((2, 2)), X):
        assert_close(staged(x), jnp.sin(x).sum())
    assert traced == [(3,), (2, 2)]


@pytest.mark.parametrize(
    "option",
    [jax.default_matmul_precision("float32"), jax.threefry_partitionable(False), jax.enable_x64(True)],
    ids=["precision", "random numbers", "x64"],
)
@on_worker0
def test_retraced_under_other_options_of_jax(big_world, option):
    def serial(key, x):
        return jax.random.normal(key, (3,)) + jnp.sin(x), jnp.arange(3) * 2.0 @ x

    traced = []

    def step(key, x):
        traced.append(x.dtype)
        return jax.random.normal(key, (3,)) + jd.rpc_sync(last(), jnp.sin, args=(x,)), jnp.arange(3) * 2.0 @ x

    staged, key = jd.jit(step), jax.random.key(0)
    for _ in range(2):
        assert_close(staged(key, X), serial(key, X))
        with option:
            assert_close(staged(key, X), serial(key, X))
        assert len(traced) == 2


@on_worker0
def test_the_callee_compiles_once_per_shape(world, counted):
    step = jd.jit(jd.value_and_grad(lambda x: jd.rpc_sync(last(), mix, args=(x, x)).sum()))
    first, *others = [X + k for k in range(6)]
    step(first)
    before = jd.rpc_sync(last(), compiled_so_far)
    for x in others:
        step(x)
    assert jd.rpc_sync(last(), compiled_so_far) == before
