"""Arguments and results that cannot be sent: the error names them, and the world works on."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.worlds import apply, last, nap, needs_pickling, on_worker0, still_works, wire_world as wire_world

import jdistgrad as jd


@needs_pickling
@on_worker0
def test_an_argument_that_cannot_be_sent_is_named(wire_world):
    bad = {"fine": 1, "bad": [2, (k for k in range(3))]}
    with pytest.raises(jd.EncodingError, match=r"cannot call .*apply on worker.*\['bad'\]\[1\], a generator"):
        jd.rpc_sync(last(), apply, args=(len, bad))
    still_works()


@needs_pickling
@on_worker0
def test_a_result_that_cannot_be_sent_is_named(wire_world):
    for call in (lambda: jd.rpc_sync(last(), make_generator), jd.remote(last(), make_generator).to_here):
        with pytest.raises(jd.EncodingError, match=r"worker\d .* cannot send the result of .*generator"):
            call()
    still_works()


def make_generator():
    return (k for k in range(3))


class Holder:
    def __init__(self, value):
        self.value = value


@needs_pickling
@on_worker0
def test_traced_values_inside_objects_are_refused(wire_world):
    """Traced values in a pytree take part in the call's derivative; inside other objects nothing finds them."""
    with pytest.raises(jd.EncodingError):
        jax.jit(lambda x: jd.rpc_sync(last(), type, args=(Holder(x),)))(1.0)
    still_works()


def future_result():
    return [jd.rpc_async(0, nap, args=(0,))]


def apply_to(function, x):
    return function(x)


def held_in(x, y):
    """Return calls of functions that hold traced values, for each of the ways in which a function can hold a value."""
    scaled = lambda z: z * x  # noqa: E731
    return {
        "closure": lambda: jd.rpc_sync(last(), lambda: 2 * x),
        "inner function": lambda: jd.rpc_async(last(), lambda: scaled(2.0), args=(y,)),
        "container": lambda held=[{"x": x}]: jd.remote(last(), lambda: held[0]["x"]),
        "default": lambda: jd.rpc_sync(last(), lambda z, w=x: z * w, args=(y,)),
        "partial": lambda: jd.rpc_sync(last(), functools.partial(apply_to, jnp.sin, x)),
        "jitted": lambda: jd.rpc_sync(last(), jax.jit(scaled), args=(y,)),
        "argument": lambda: jd.rpc_sync(last(), apply_to, args=(scaled, y)),
        "method": lambda: jd.remote(last(), types.MethodType(jnp.multiply, x), args=(y,)),
    }


@pytest.mark.parametrize("transformed", [jax.grad, jax.jit, jax.vmap], ids=lambda one: one.__name__)
@on_worker0
def test_functions_that_hold_traced_arrays_are_refused(world, transformed):
    """No derivative with respect to such arrays exists: the error says that they must be arguments."""
    x = jnp.float32(2) if transformed is jax.grad else jnp.ones(3)
    for how in held_in(None, None):
        with jd.context(), pytest.raises(jd.EncodingError, match=r"cannot call .*pass it as an argument"):
            transformed(lambda x, how=how: held_in(x, 3.0)[how]())(x)
    still_works()


@needs_pickling
@on_worker0
def test_a_future_inside_a_result_is_refused(wire_world):
    with pytest.raises(jd.EncodingError):
        jd.rpc_sync(last(), future_result)


def dtype_of(x):
    return str(x.dtype)


@on_worker0
def test_jax_doubles_on_a_worker_without_them(big_world):
    """NumPy's doubles travel as they are; a JAX double either arrives as a JAX double or is refused."""
    assert jd.rpc_sync(last(), dtype_of, args=(np.ones(2),)) == "float64"
    with jax.enable_x64(True):
        for double in (jnp.ones(2, jnp.float64), jnp.asarray(0.1)):
            with pytest.raises(jd.EncodingError, match=r"float64 array .* whose JAX makes it float32.*jax_enable_x64"):
                jd.rpc_sync(last(), dtype_of, args=(double,))
        with pytest.raises(jd.EncodingError):
            jd.rpc_sync(last(), dtype_of, args=(jnp.asarray(2**40),))
        assert jd.rpc_sync(last(), dtype_of, args=(jnp.ones(2, jnp.float32),)) == "float32"
    still_works()
