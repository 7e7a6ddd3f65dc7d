"""The codec: snapshots, copies, and values that are decoded only once."""

import gc
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jdistgrad.rpc.codec import PickleCodec

LARGE = 100_000


@pytest.mark.parametrize("dtype", ["f8", "i4, f4"])
def test_a_snapshot_does_not_see_later_changes_and_without_one_nothing_is_copied(dtype):
    codec, array = PickleCodec(), np.zeros(LARGE, dtype)
    parcel = codec.encode(array, snapshot=True)
    (buffer,) = codec.encode(array, snapshot=False).buffers
    assert np.shares_memory(np.asarray(buffer), array)
    array.view("i4")[0] = 7
    assert codec.decode(parcel)[0] == np.zeros(1, dtype)[0]


def test_jax_arrays_are_never_copied():
    codec, array = PickleCodec(), jnp.zeros(LARGE)
    (buffer,) = codec.encode(array, snapshot=True).buffers
    assert np.shares_memory(np.asarray(buffer), np.asarray(array))


def test_a_message_that_is_garbage_is_collected_in_silence(monkeypatch):
    """From Python 3.13 on, a stream of bytes that others still read is an exception that nobody can catch."""
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    kept = [PickleCodec().encode("text", snapshot=True)]
    kept.append(kept)
    del kept
    gc.collect()
    assert not ignored
