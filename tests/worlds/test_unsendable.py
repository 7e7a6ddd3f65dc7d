"""Arguments and results that cannot be sent: they are named, and nothing is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import apply, last, nap, needs_pickling, still_works, wire_world as wire_world

import jdistgrad as jd


@needs_pickling
def test_an_argument_that_cannot_be_sent_is_named(wire_world):
    def body():
        bad = {"fine": 1, "bad": [2, (k for k in range(3))]}
        with pytest.raises(jd.EncodingError, match=r"cannot call .*apply on worker.*\['bad'\]\[1\], a generator"):
            jd.rpc_sync(last(), apply, args=(len, bad))
        still_works()

    wire_world.drive(body)


@needs_pickling
def test_a_result_that_cannot_be_sent_is_named(wire_world):
    def body():
        for call in (lambda: jd.rpc_sync(last(), make_generator), jd.remote(last(), make_generator).to_here):
            with pytest.raises(jd.EncodingError, match=r"worker\d .* cannot send the result of .*generator"):
                call()
        still_works()

    wire_world.drive(body)


def make_generator():
    return (k for k in range(3))


class Holder:
    def __init__(self, value):
        self.value = value


@needs_pickling
def test_traced_values_inside_objects_are_refused(wire_world):
    """In a container of JAX's they are part of the call's derivative; elsewhere nobody finds them."""

    def body():
        with pytest.raises(jd.EncodingError, match=r"a traced value has no data yet"):
            jax.jit(lambda x: jd.rpc_sync(last(), type, args=(Holder(x),)))(1.0)
        still_works()

    wire_world.drive(body)


def future_result():
    return [jd.rpc_async(0, nap, args=(0,))]


@needs_pickling
def test_a_future_inside_a_result_is_refused(wire_world):
    def body():
        with pytest.raises(jd.EncodingError, match="a future cannot be sent"):
            jd.rpc_sync(last(), future_result)

    wire_world.drive(body)


def dtype_of(x):
    return str(x.dtype)


@needs_pickling
def test_jax_doubles_on_a_worker_without_them(wire_world):
    """NumPy's doubles travel as they are; a JAX double arrives as one or not at all."""

    def body():
        assert jd.rpc_sync(last(), dtype_of, args=(np.ones(2),)) == "float64"
        with jax.enable_x64(True):
            double = jnp.ones(2, jnp.float64)
            with pytest.raises(jd.EncodingError, match=r"float64 array .* whose JAX makes it float32.*jax_enable_x64"):
                jd.rpc_sync(last(), dtype_of, args=(double,))
        still_works()

    wire_world.drive(body)


def make_lambda():
    return lambda: 1


@needs_pickling
def test_a_result_that_is_code_is_refused_at_once(wire_world):
    def body():
        with pytest.raises(jd.EncodingError, match=r"cannot send the result of .*make_lambda.*top level of a module"):
            jd.rpc_sync(last(), make_lambda)
        still_works()

    wire_world.drive(body)
