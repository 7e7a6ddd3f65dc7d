"""Receive buffers: reused as soon as no array uses them any more, and not earlier."""

import gc

import jax
import numpy as np
from hypothesis import given, strategies as st

from jdistgrad.wire.memory import BufferPool, size_class


def test_a_returned_block_is_used_again():
    pool = BufferPool()
    lease = pool.lease(100_000)
    address = lease.ctypes.data
    del lease
    assert pool.lease(100_000).ctypes.data == address


def test_a_view_keeps_its_block():
    pool = BufferPool()
    lease = pool.lease(100_000)
    view = lease.view(np.float32)[10:20].reshape(2, 5)
    view[:] = 7
    address = lease.ctypes.data
    del lease
    other = pool.lease(100_000)
    assert other.ctypes.data != address
    other[:] = 0
    assert (view == 7).all()


def test_a_jax_array_that_aliases_keeps_its_block():
    pool = BufferPool()
    lease = pool.lease(400_000)
    lease.view(np.float32)[:] = 3
    array = jax.device_put(lease.view(np.float32))
    assert array.unsafe_buffer_pointer() == lease.ctypes.data
    del lease
    for _ in range(3):
        pool.lease(400_000)[:] = 0
    assert (np.asarray(array) == 3).all()
    del array
    gc.collect()  # JAX releases host memory at the next call of JAX, or in a garbage collection
    assert pool.idle_bytes >= 2 * size_class(400_000)


def test_no_more_than_the_limit_stays_warm():
    pool = BufferPool(idle_limit=300_000)
    leases = [pool.lease(100_000) for _ in range(5)]
    del leases
    assert pool.idle_bytes <= 300_000


@given(st.integers(1, 1 << 40))
def test_size_classes_waste_little(nbytes):
    assert nbytes <= size_class(nbytes) <= max(nbytes * 1.15, nbytes + (1 << 16))
