"""Decorators that run tests in worlds, and functions for workers: small tasks, and checks of what workers own."""

import functools
import gc
import inspect
import operator
import time

import jax.numpy as jnp
import pytest

import jdistgrad as jd
from jdistgrad.rpc.current import within
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire import launcher_env

needs_pickling = pytest.mark.skipif(
    not launcher_env.launched(),
    reason="local worlds hand objects over unpickled: the run with 3 ranks runs this test",
)


@pytest.fixture
def wire_world(world):
    """Return a world of several workers: under mpirun, messages from worker 0 to the last worker are pickled."""
    if world.size == 1:
        pytest.skip("one rank calls itself without pickling: the run with 3 ranks runs this test")
    return world


def on_worker0(test=None, **settings):
    """Let worker 0 run a test that has a world among its fixtures, while the other workers serve.

    Arguments:
      settings: arguments of ``World.drive``.
    """
    if test is None:
        return functools.partial(on_worker0, **settings)

    @functools.wraps(test)
    def run(**fixtures):
        world_of(fixtures).drive(functools.partial(test, **fixtures), **settings)

    return run


def on_every_worker(test):
    """Let every worker run a test with a world among its fixtures and ``rank`` and ``size`` as its last arguments."""

    @functools.wraps(test)
    def run(**fixtures):
        on_all(world_of(fixtures), functools.partial(test, **fixtures))

    signature = inspect.signature(test)
    *asked, rank, size = signature.parameters.values()
    assert (rank.name, size.name) == ("rank", "size")
    run.__signature__ = signature.replace(parameters=asked)
    return run


def world_of(fixtures):
    (name,) = fixtures.keys() & {"world", "big_world", "wire_world"}
    return fixtures[name]


def on_all(world, body):
    """Run ``body(rank=, size=)`` on every worker of a world; return the results that this process sees."""

    def main():
        me = jd.init()
        result = body(rank=me.rank, size=jd.world_size())
        jd.shutdown()
        return result

    return world.run(main)


def last():
    return jd.world_size() - 1


def peers():
    return [rank for rank in range(jd.world_size()) if rank != jd.worker_info().rank] or [0]


def rank(k):
    """Return the rank of the worker for the k-th call, in a world of any size."""
    return k % jd.world_size()


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
    """Return how many values this worker owns for references."""
    return len(current_worker().references.owned.entries)


def owned_here():
    """Collect this worker's garbage, which may hold references; return how many values it owns then."""
    gc.collect()
    return owned_values()


def wait_until_owned(rank, count):
    gc.collect()  # exceptions that pytest.raises has caught are in reference cycles
    deadline = time.monotonic() + 20
    while (found := jd.rpc_sync(rank, owned_here)) != count:
        assert time.monotonic() < deadline, f"worker {rank} owns {found} values, not {count}"
        time.sleep(0.01)


def scaled(p, x):
    return p["w"] * x + p["n"]


def make_weights(k):
    return {"w": jnp.arange(3.0) + k, "n": k}


def takes_part():
    return current_worker().scopes.identifiers()


def holders():
    """Return the ranks of the workers that take part in any context."""
    with within(None):
        return {k for k in range(jd.world_size()) if jd.rpc_sync(k, takes_part)}


def wait_until_nobody_takes_part():
    gc.collect()
    deadline = time.monotonic() + 20
    while found := holders():
        assert time.monotonic() < deadline, f"still taking part: {found}"
        time.sleep(0.005)


def relay(path, x):
    return jd.rpc_sync(path[0], relay, args=(path[1:], x)) if path else x * x


def gradients_here(context):
    return {rref.id: gradient for rref, gradient in jd.get_gradients(context).items()}
