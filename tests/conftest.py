"""One suite for every kind of world: threads of this process, or the ranks of the MPI job pytest was started in.

    pytest                                          # local worlds of 1 and 3 workers
    jdistgrad run -n 3 -m pytest -m "not one_process"   # the ranks there are; every rank runs every test

A test that needs a world asks for ``world`` and gives it a body for worker 0 (``drive``), or a whole program for
every worker (``run``). Functions that run remotely stand at the top level of a test module.
"""

import os
import pathlib
import signal
import subprocess
import textwrap
import threading
import time

import jax
import pytest

import jdistgrad as jd
from jdistgrad import launch
from jdistgrad.rpc.current import find_worker
from jdistgrad.wire import environment

TIME_LIMIT = 65  # pytest.ini's faulthandler_timeout has printed the stacks 5 s before

SIZES = [1, 3]  # the runs under mpirun have all from 1 to 4

if not environment.launched():
    jax.config.update("jax_num_cpu_devices", 8)


def mpi_size():
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


class World:
    """Runs programs as the workers of a world, and checks that nothing is left of them."""

    def __init__(self, size):
        self.size = size

    def run(self, main, *args):
        """``main`` on every worker; it calls ``init`` and ``shutdown`` itself. Returns the results in this process."""
        return [main(*args)] if environment.launched() else jd.spawn(main, self.size, args=args)

    def drive(self, body, *, leftovers=0, **settings):
        """``body`` on worker 0 while the others serve; every table must be empty in the end."""

        def main():
            me = jd.init(**settings)
            result = body() if me.rank == 0 else None
            left = jd.shutdown()
            assert len(left) <= leftovers, left
            return result

        return self.run(main)[0]


@pytest.fixture(params=[mpi_size()] if environment.launched() else SIZES, ids=lambda size: f"{size}-workers")
def world(request):
    yield World(request.param)
    close_what_a_failed_test_left_open()


@pytest.fixture(params=[mpi_size()] if environment.launched() else [3], ids=lambda size: f"{size}-workers")
def big_world(request):
    """A world for tests that have nothing to say about fewer than three workers."""
    if request.param < 3:
        pytest.skip("needs three workers: the runs with 3 and 4 ranks, and the local one, have them")
    yield World(request.param)
    close_what_a_failed_test_left_open()


def close_what_a_failed_test_left_open():
    if find_worker() is not None:
        jd.shutdown(graceful=False)


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where the suite was started in the background, or a test left a handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def time_limit():
    """Ends this rank, and with it the job, when a test hangs."""
    timer = threading.Timer(TIME_LIMIT, os._exit, [3])
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


def pytest_runtest_logreport(report):
    """One rank's failure ends the job: the others would wait for it in the next test."""
    if report.failed and environment.launched():
        from mpi4py import MPI

        print(f"\nrank {MPI.COMM_WORLD.rank}: {report.nodeid} failed\n{report.longreprtext}", flush=True)
        if MPI.COMM_WORLD.size > 1:
            MPI.COMM_WORLD.Abort(1)


class Job:
    """A finished job: its exit status, what it printed, how long it took."""

    def __init__(self, process, seconds):
        self.status, self.output, self.seconds = process.returncode, process.stdout, seconds

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
        start = time.monotonic()
        process = subprocess.run(
            launch.command(n, [str(script)]),
            env=variables,
            timeout=timeout,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return Job(process, time.monotonic() - start)

    return run
