"""One suite for every kind of world: threads of this process, or the ranks of the MPI job pytest was started in.

    pytest                                          # local worlds of 3 workers, where it matters of 1 too
    jdistgrad run -n 3 -m pytest -m "not one_process"   # the ranks there are; every rank runs every test

A test that needs a world asks for ``world`` and gives it a body for worker 0 (``drive``), or a whole program for
every worker (``run``). Functions that run remotely stand at the top level of a test module.
"""

import gc
import os
import pathlib
import signal
import subprocess
import textwrap

import jax
import pytest

from jdistgrad.cli import launch
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
    """Of the runs under mpirun, the one with three ranks has the tests of three workers."""
    if launcher_env.launched() and mpi_size() != 3:
        big = [item for item in items if "big_world" in item.fixturenames]
        config.hook.pytest_deselected(items=big)
        items[:] = [item for item in items if item not in big]


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


class Job:
    """A finished job: its exit status, and what it printed."""

    def __init__(self, process):
        self.status, self.output = process.returncode, process.stdout

    def expect(self, *texts, status=0):
        """Check the exit status (``None``: any failure) and that all of these texts were printed."""
        assert self.status == status if status is not None else self.status != 0, self.output
        for text in texts:
            assert text in self.output, f"{text!r} is not in\n{self.output}"
        return self


@pytest.fixture
def mpi_job(tmp_path):
    """Runs a program on some ranks: a job of its own, for what no test survives."""

    def run(n, source, *, timeout=60, **environment):
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(source))
        paths = os.pathsep.join(str(pathlib.Path(__file__).parent / part) for part in ("worlds", "jobs"))
        variables = {**os.environ, "PYTHONPATH": paths, **environment}
        process = subprocess.run(
            launch.command(n, [str(script)]),
            env=variables,
            timeout=timeout,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return Job(process)

    return run
