"""Python functions called from compiled code: their threads, their memory, and the errors they raise."""

import gc
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jdistgrad.ffi import sites
from jdistgrad.ffi.lowering import call_in_order, lower

host_p = Primitive("host_call_of_a_test")
host_p.def_abstract_eval(lambda x, function: x)
mlir.register_lowering(
    host_p, lambda context, x, function: lower(context, [x], context.avals_in, function), platform="cpu"
)


def calling(function):
    """Return a compiled function that calls ``function`` in its middle. With large arrays it runs on XLA's threads."""
    return jax.jit(lambda x: jnp.cos(host_p.bind(jnp.sin(x), function=function)))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, (2, 3)) for dtype in ("float32", "bfloat16", "bool", "complex64", "int4", "uint4")),
        ("int8", ()),
        ("int4", (0, 4)),
    ],
)
def test_arrays_of_all_kinds_come_and_go(dtype, shape):
    x = jnp.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2, dtype)
    seen = []

    def flip(x):
        seen.append((x.shape, x.dtype))
        return [np.flip(x)]

    np.testing.assert_array_equal(jax.jit(lambda x: host_p.bind(x, function=flip))(x), np.flip(x))
    assert seen == [(shape, x.dtype)] * (x.size > 0)  # XLA leaves out operations with empty results


def test_more_programs_wait_than_xla_has_threads():
    count = 24  # JAX allows 32 programs of a device to be under way
    everybody = threading.Barrier(count)

    def meet(x):
        everybody.wait(60)
        return [x]

    found = [None] * count

    def run(k):
        found[k] = np.asarray(calling(meet)(jnp.full((300, 300), k / count)))

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(count):
        np.testing.assert_allclose(found[k], np.cos(np.sin(k / count)), rtol=1e-6)


def test_a_function_may_keep_its_arguments():
    """XLA reuses the memory of arguments, so the function must get copies."""
    kept = []

    def keep(x):
        kept.append(x)
        return [x]

    run = calling(keep)
    for k in range(5):
        jax.block_until_ready(run(jnp.full((200, 200), float(k))))
    for k, x in enumerate(kept):
        np.testing.assert_allclose(x, np.sin(float(k)), rtol=1e-6)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyError("gone"), "INTERNAL"),
        (TimeoutError("late"), "DEADLINE_EXCEEDED"),
        (ConnectionError("x"), "UNAVAILABLE"),
    ],
)
def test_an_error_says_its_type_its_text_and_its_notes(error, code):
    error.add_note("on worker1")

    def fail(x):
        raise error

    expected = rf"(?s){code}: {type(error).__name__}: .*{error.args[0]}.*on worker1"
    with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
        jax.block_until_ready(calling(fail)(jnp.ones((300, 300))))


def test_calls_with_an_effect_keep_their_order_and_none_is_left_out():
    (effect,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects
    called = []

    @jax.jit
    def program(x):
        for k in range(4):
            call_in_order(lambda k=k: called.append(k), (), effect=effect, quick=k % 2 == 1)
        return x

    for _ in range(3):
        program(jnp.ones(3))
    jax.effects_barrier()
    assert called == [0, 1, 2, 3] * 3


def test_a_site_goes_with_its_program():
    before, run = set(sites._sites), calling(lambda x: [x])
    run(jnp.ones(3))
    (made,) = set(sites._sites) - before
    del run
    jax.clear_caches()
    gc.collect()
    assert made not in sites._sites


def test_a_program_under_way_keeps_its_sites_when_nobody_keeps_its_function():
    """The program runs when its argument has been copied to its device: by then the compiled function is gone."""
    large, device = jnp.ones((64, 1024, 1024)), jax.devices()[-1]
    like = jax.ShapeDtypeStruct(large.shape, large.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
    program = jax.jit(lambda x: host_p.bind(x[0, :3, :3], function=lambda x: [2 * x])).lower(like).compile()
    found = program(jax.device_put(large, device))
    del program
    gc.collect()
    np.testing.assert_array_equal(found, np.full((3, 3), 2.0))


def test_devices_share_their_calls_whoever_is_ahead():
    calls, numbers = sites.SharedCalls(2, {0: "a", 1: "a", 2: "b", 3: "b"}), itertools.count()
    first, second, of_another_run = (calls.once(run, 0, 0, numbers.__next__) for run in (1, 1, 2))
    assert [second(), first(), of_another_run()] == [0, 1, 2]
    assert [calls.once(run, 1, 0, numbers.__next__)() for run in (1, 2, 1, 1)] == [1, 2, 0, 3]
    assert [calls.once(1, device, 0, numbers.__next__)() for device in (0, 2, 1, 0, 3)] == [3, 4, 5, 5, 4]
    ways = [(0, "here"), (0, "there"), (1, "there"), (1, "here")]
    assert [calls.once(3, device, place, numbers.__next__)() for device, place in ways] == [6, 7, 7, 6]
