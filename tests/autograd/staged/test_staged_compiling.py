"""Staged steps are traced, and their pieces compiled, once for each kind of arguments; keys of programs."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.data import assert_close
from helpers.programs import X, mix
from helpers.worlds import last, on_every_worker, on_worker0

import jdistgrad as jd
from jdistgrad import jaxprs
from jdistgrad.autograd.staged.rewriting import SMALL

pytestmark = pytest.mark.world(1, 3)


class Compilations:
    """A count of the programs that this process compiles in a block."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *error):
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event, seconds, **details):
        self.count += event == "/jax/core/compile/backend_compile_duration"


@on_worker0
def test_alike_pieces_are_compiled_once(big_world):
    step = jd.jit(lambda xs: sum(jd.rpc_sync(last(), mix, args=(x, x)).sum() * 3.5 for x in xs))
    xs = [X + k for k in range(12)]
    step(xs[:4])
    with Compilations() as compiled:
        found = step(xs)
    assert compiled.count == 0
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


ROWS = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def layers(x, scale=2.0, times=3, axis=0):
    """Return something with nested jaxprs of every kind: jit, scan, cond, a custom derivative."""
    x = nn.gelu(x * scale).sum(axis) + jax.nn.relu(x).sum(axis)
    x = jax.lax.scan(lambda x, _: (jnp.tanh(x), None), x, None, length=times)[0]
    return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)


def key_of(function, *args):
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return jaxprs.key(jaxpr.eqns, jaxpr.invars, jaxpr.outvars)


def test_equal_programs_have_equal_keys():
    def afresh():
        def program(x):
            return jax.value_and_grad(lambda x: layers(x).sum())(x)

        return key_of(program, ROWS)

    assert afresh() == afresh()
    assert hash(afresh()) == hash(afresh())


@pytest.mark.parametrize(
    "other",
    [
        lambda x: layers(x, scale=3.0),
        lambda x: layers(x, times=4),
        lambda x: layers(x, axis=1),
        lambda x: layers(x) * 1,
        lambda x: layers(x[::-1]),
    ],
    ids=["number", "loop", "parameter", "one more", "order"],
)
def test_other_programs_have_other_keys(other):
    assert key_of(layers, ROWS) != key_of(other, ROWS)


@pytest.mark.parametrize(
    "other", [ROWS[:, :2], ROWS.astype(jnp.bfloat16), jnp.int32(3)], ids=["shape", "type", "other number of dimensions"]
)
def test_programs_of_other_types_have_other_keys(other):
    def loops(x):
        return jax.lax.scan(lambda x, _: (x + x, None), x, None, length=3)[0]

    assert key_of(loops, ROWS) != key_of(loops, other)
    assert key_of(lambda x: x + x, ROWS) != key_of(lambda x: x + x, other)


def test_arrays_that_programs_hold_are_equal_only_to_themselves():
    def held(array):
        return key_of(jax.jit(lambda x: x + array), ROWS)

    one, other = jnp.ones((2, 3)), jnp.ones((2, 3))
    assert held(one) == held(one)
    assert held(one) != held(other)


def test_what_calls_back_is_found():
    def equations(function):
        return jax.make_jaxpr(function)(ROWS).jaxpr.eqns

    def noisy(x):
        jax.debug.print("{}", x)
        return x

    def asks(x):
        return jax.pure_callback(np.sin, x, x)

    assert not jaxprs.calls_back(equations(layers))
    assert jaxprs.calls_back(equations(noisy))
    assert jaxprs.calls_back(equations(jax.jit(asks)))
    assert jaxprs.calls_back(equations(lambda x: jax.lax.scan(lambda x, _: (asks(x), None), x, None, length=2)[0]))


@on_every_worker
def test_data_parallel_steps_are_compiled_once_in_a_process(big_world, rank, size):
    params, x = {"w": jnp.full((3, 4 + size), 0.1), "b": jnp.zeros(4 + size)}, ROWS + rank

    def loss(params, x):
        return (jnp.tanh(x @ params["w"] + params["b"]) ** 2).sum()

    def step():
        return jd.DataParallel(bucket_cap_mb=1e-6).value_and_grad(loss)(params, x)

    found = step()
    assert_close(jd.DataParallel(bucket_cap_mb=1e-6).value_and_grad(loss)(params, x[:1])[0], loss(params, x[:1]))
    jd.barrier()
    with Compilations() as compiled:
        again = step()
        jd.barrier()
    assert_close(found, again)
    assert compiled.count == 0
