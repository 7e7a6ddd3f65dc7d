"""Arrays between NumPy and JAX: JAX arrays share no memory that a program may change."""

import mmap

import jax
import numpy as np
import pytest

from jdistgrad.wire.arrays import ALIAS_FROM, COMPILE_FROM, as_jax_array


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


def test_many_small_arrays_are_jaxs_where_nothing_is_compiled():
    small = np.ones((3, 1, 2), np.float32)
    with jax.disable_jit():
        assert all(isinstance(as_jax_array(small), jax.Array) for _ in range(COMPILE_FROM + 2))
