"""One suite for every kind of world: threads of this process, or the ranks of the MPI job pytest was started in.

pytest                            # local worlds of 3 workers, where it matters of 1 too
jdistgrad run -n 3 -m pytest      # the ranks there are; every rank runs every test that asks for a world
"""

import gc
import signal
import textwrap

import jax
import pytest
from helpers.jobs import finished_job

from jdistgrad.wire import launcher_env

SIZES = [1] if launcher_env.launched() else [3]  # under mpirun: any size will do, and there are runs with 1 to 4

if not launcher_env.launched():
    jax.config.update("jax_num_cpu_devices", 8)


def pytest_sessionstart(session):
    """What a test gets that says nothing of sizes."""
    session.add_marker(pytest.mark.world(*SIZES))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    if "big_world" in metafunc.fixturenames:
        metafunc.definition.add_marker(pytest.mark.world(3))


def pytest_collection_modifyitems(config, items):
    """Leave to the run in one process what needs no ranks; to the one with three ranks the tests of three workers."""
    if launcher_env.launched():
        three = mpi_size() == 3
        left_out = [item for item in items if not needs_ranks(item) or ("big_world" in item.fixturenames and not three)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def needs_ranks(item):
    if item.get_closest_marker("every_rank"):
        return True
    return "world" in item.fixturenames and not item.get_closest_marker("one_process")


def mpi_size():
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


@pytest.fixture
def big_world(world):
    """A world of three workers, for tests to which another size would add nothing."""
    return world


@pytest.fixture(autouse=True, scope="module")
def what_stands_is_not_collected():
    """Worlds collect garbage when they end: that takes 5 ms instead of 100 without all that JAX has loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def every_test_is_guarded(world_guard):
    """Also those that need no world: every rank runs them."""


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where the suite was started in the background, or a test left a handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def mpi_job(tmp_path):
    """Runs a program on some ranks: a job of its own, for what no test survives."""

    def run(n, source, *, timeout=60, **environment):
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(source))
        return finished_job(n, script, timeout, environment)

    return run
