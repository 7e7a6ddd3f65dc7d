"""What tests ask of workers: something small to do, whether they still work, how much they own for others."""

import gc
import operator
import time

import jax.numpy as jnp
import pytest

import jdistgrad as jd
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire import launcher_env

needs_pickling = pytest.mark.skipif(
    not launcher_env.launched(),
    reason="local worlds hand objects over unpickled: the runs with 2, 3 and 4 ranks have it",
)


@pytest.fixture
def wire_world(world):
    """A world in which a message from worker 0 to the last one is pickled."""
    if world.size == 1:
        pytest.skip("one rank calls itself without pickling: the runs with 2, 3 and 4 ranks have it")
    return world


def last():
    return jd.world_size() - 1


def still_works():
    for rank in range(jd.world_size()):
        assert jd.rpc_sync(rank, operator.add, args=(rank, 1)) == rank + 1


def nap(seconds):
    time.sleep(seconds)
    return seconds


def apply(function, x):
    return function(x)


def make(n):
    return jnp.arange(n, dtype=jnp.float32)


def owned_values():
    """How many values this worker owns for others."""
    return len(current_worker().references.owned)


def owned_here():
    """The same, once what has been dropped has come home."""
    gc.collect()
    return owned_values()


def wait_until_owned(rank, count):
    gc.collect()  # what pytest.raises has seen lives in a cycle
    deadline = time.monotonic() + 20
    while (found := jd.rpc_sync(rank, owned_here)) != count:
        assert time.monotonic() < deadline, f"worker {rank} owns {found} values, not {count}"
        time.sleep(0.01)
