"""Arrays on their way, without a wire: each kind arrives unchanged, and shares no memory that a program may change."""

import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdistgrad.errors import EncodingError
from jdistgrad.leaves import as_jax_array
from jdistgrad.rpc.codec import PickleCodec
from jdistgrad.wire.arrays import ALIAS_FROM, ArrayBlock
from jdistgrad.wire.memory import BufferPool

CODEC = PickleCodec()


def sent(*arrays):
    return CODEC.decode(CODEC.encode(ArrayBlock(arrays), snapshot=True))


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["JAX", "NumPy"])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float32", ()), ("bfloat16", (3,)), ("complex64", (0, 2)), ("int8", (2, 3, 5)), ("bool", ())],
)
def test_small_arrays_arrive_as_numpy_arrays(make, dtype, shape):
    array = make(np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(jnp.dtype(dtype)).T)  # not contiguous
    before, found, after = sent(make(np.ones(7, np.int8)), array, make(np.float32(2)))
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found, np.asarray(array))
    np.testing.assert_array_equal(before, np.ones(7, np.int8))
    assert found.flags.aligned
    assert not found.flags.writeable
    assert after == 2


def test_large_ones_are_not_copied():
    large = jnp.arange(ALIAS_FROM, dtype=jnp.int32)
    parcel = CODEC.encode(
        ArrayBlock([np.float32(1), large, np.ones(3, np.int8), large.astype(jnp.bfloat16)]), snapshot=False
    )
    assert np.shares_memory(np.frombuffer(parcel.buffers[1], np.uint8), np.asarray(large))
    first, second, third, fourth = CODEC.decode(parcel)
    assert np.shares_memory(second, np.asarray(large))
    np.testing.assert_array_equal(second, large)
    assert (first, third.tolist(), fourth.dtype) == (1, [1, 1, 1], jnp.bfloat16)


@pytest.mark.parametrize("make", [jnp.asarray, np.array], ids=["JAX", "NumPy"])
def test_large_ones_become_arrays_of_jax_where_the_wire_has_put_them(make):
    large = make(np.arange(ALIAS_FROM, dtype=np.int32))
    parcel = CODEC.encode(ArrayBlock([large]), snapshot=False)
    lease = BufferPool().lease(large.nbytes)
    lease[:] = np.frombuffer(parcel.buffers[0], np.uint8)
    parcel.buffers[0] = lease
    (found,) = CODEC.decode(parcel)
    assert not found.flags.writeable
    made = as_jax_array(found)
    assert made.unsafe_buffer_pointer() == lease.ctypes.data
    np.testing.assert_array_equal(made, large)


def test_weak_numbers_and_random_keys_stay_what_they_are():
    number, array = sent(jnp.asarray(2.0), jnp.ones(3))
    assert number.weak_type
    key, _ = sent(jax.random.key(3), jnp.ones(3))
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(3)))
    np.testing.assert_array_equal(array, np.ones(3))


@pytest.mark.parametrize("array", [np.array([None]), np.zeros(2, [("a", "f4")])], ids=["objects", "records"])
def test_what_jax_has_no_type_for_is_left_to_pickle(array):
    assert sent(array, np.ones(1, np.float32))[0].dtype == array.dtype


def test_a_type_that_the_other_side_does_not_have_is_refused():
    with jax.enable_x64(True):
        parcel = CODEC.encode(ArrayBlock([np.ones(3)]), snapshot=True)
        np.testing.assert_array_equal(CODEC.decode(parcel)[0], np.ones(3))
    with pytest.raises(EncodingError):
        CODEC.decode(parcel)


def test_traced_values_are_refused():
    with pytest.raises(EncodingError):
        jax.jit(sent)(jnp.ones(3))


@pytest.mark.parametrize(
    "make",
    [lambda: np.ones(ALIAS_FROM, np.float32), lambda: np.frombuffer(mmap.mmap(-1, 4 * ALIAS_FROM), np.float32)],
    ids=["of NumPy's", "of another's"],
)
def test_a_jax_array_of_a_read_only_view_does_not_see_later_changes_of_its_memory(make):
    array = make()
    array[:] = 1
    view = array[:]
    view.flags.writeable = False
    made = as_jax_array(view)
    array[:] = 2
    assert made.tolist() == [1.0] * ALIAS_FROM


def test_read_only_memory_that_is_not_numpys_is_shared():
    view = np.frombuffer(memoryview(mmap.mmap(-1, 4 * ALIAS_FROM)).toreadonly(), np.float32)
    assert np.shares_memory(np.asarray(as_jax_array(view)), view)


@pytest.mark.parametrize("shape", [(), (0, 2), (3, 1, 2), (ALIAS_FROM,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool", "complex64"])
def test_arrays_are_jaxs_also_where_nothing_is_compiled(dtype, shape):
    with jax.disable_jit():
        made = as_jax_array(np.ones(shape, jnp.dtype(dtype)))
    assert isinstance(made, jax.Array)
    assert (made.dtype, made.shape, made.weak_type) == (jnp.dtype(dtype), shape, False)
    assert (np.asarray(made) == 1).all()
