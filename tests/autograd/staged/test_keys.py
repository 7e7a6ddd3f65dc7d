"""Keys of what equations compute, and compiled code that workers and objects of one process share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.data import assert_close
from helpers.worlds import last, on_every_worker, on_worker0

import jdistgrad as jd
from jdistgrad import jaxprs

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


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

        return key_of(program, X)

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
    assert key_of(layers, X) != key_of(other, X)


@pytest.mark.parametrize(
    "other", [X[:, :2], X.astype(jnp.bfloat16), jnp.int32(3)], ids=["shape", "type", "other number of dimensions"]
)
def test_programs_of_other_types_have_other_keys(other):
    def loops(x):
        return jax.lax.scan(lambda x, _: (x + x, None), x, None, length=3)[0]

    assert key_of(loops, X) != key_of(loops, other)
    assert key_of(lambda x: x + x, X) != key_of(lambda x: x + x, other)


@pytest.mark.parametrize("rows", [[2, 5, 1], [4, 2]])
@on_worker0
def test_staged_steps_of_several_shapes(big_world, rows):
    step = jd.jit(jd.value_and_grad(lambda x: layers(jd.rpc_sync(last(), jnp.sin, args=(x,)), axis=1).sum()))
    for count in rows:
        x = jnp.linspace(0.1, 1.0, 3 * count).reshape(count, 3)
        with jd.context():
            assert_close(step(x), jax.value_and_grad(lambda x: layers(jnp.sin(x), axis=1).sum())(x))


def test_the_order_of_inputs_and_outputs_counts():
    jaxpr = jax.make_jaxpr(lambda a, b: (a - b, a * b))(X, X).jaxpr
    first = jaxprs.key(jaxpr.eqns, jaxpr.invars, jaxpr.outvars)
    assert first != jaxprs.key(jaxpr.eqns, jaxpr.invars[::-1], jaxpr.outvars)
    assert first != jaxprs.key(jaxpr.eqns, jaxpr.invars, jaxpr.outvars[::-1])


def test_arrays_that_programs_hold_are_equal_only_to_themselves():
    def held(array):
        return key_of(jax.jit(lambda x: x + array), X)

    one, other = jnp.ones((2, 3)), jnp.ones((2, 3))
    assert held(one) == held(one)
    assert held(one) != held(other)


def test_what_calls_back_is_found():
    def equations(function):
        return jax.make_jaxpr(function)(X).jaxpr.eqns

    def noisy(x):
        jax.debug.print("{}", x)
        return x

    def asks(x):
        return jax.pure_callback(np.sin, x, x)

    assert not jaxprs.calls_back(equations(layers))
    assert jaxprs.calls_back(equations(noisy))
    assert jaxprs.calls_back(equations(jax.jit(asks)))
    assert jaxprs.calls_back(equations(lambda x: jax.lax.scan(lambda x, _: (asks(x), None), x, None, length=2)[0]))


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


@on_every_worker
def test_data_parallel_steps_are_compiled_once_in_a_process(big_world, rank, size):
    params, x = {"w": jnp.full((3, 4 + size), 0.1), "b": jnp.zeros(4 + size)}, X + rank

    def loss(params, x):
        return (layers(x @ params["w"] + params["b"]) ** 2).sum()

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


@on_worker0
def test_steps_of_equal_pieces_are_compiled_once(world):
    def step():
        return jd.jit(jd.value_and_grad(lambda x: layers(jd.rpc_sync(last(), jnp.sin, args=(x,)) * 1.25).sum()))

    x = jnp.ones((5, 7))
    with jd.context():
        found = step()(x)
    with Compilations() as compiled, jd.context():
        again = step()(x)
    assert_close(found, again)
    assert compiled.count == 0
