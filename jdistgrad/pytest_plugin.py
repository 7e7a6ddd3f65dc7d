"""What pytest gets from jdistgrad: the fixture ``world``, for tests of code that runs on several workers.

    @pytest.mark.world(3)
    def test_somebody_else_adds(world):
        assert world.drive(lambda: jd.rpc_sync("worker2", operator.add, args=(1, 2))) in (3, None)

The workers are threads of this process; under mpirun they are the ranks there are, and every rank runs every test.
pytest loads this module in every run of everybody who has jdistgrad installed: it imports neither jax nor MPI before a
test asks for a world.
"""

import faulthandler
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jdistgrad.wire import launcher_env

SIZE = 3  # two workers hide mistakes that three show


class World:
    """Runs programs as the workers of a world: what a test gets as ``world``.

    Attributes:
      size: how many workers there are.
    """

    def __init__(self, size: int):
        self.size = size

    def run(self, main: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``main`` on every worker; it calls ``init`` and ``shutdown`` itself.

        Returns:
          What it returned, by rank; under mpirun what it returned on this rank.
        """
        import jdistgrad as jd

        return [main(*args)] if launcher_env.launched() else jd.spawn(main, self.size, args=args)

    def drive(self, body: Callable[[], Any], *, leftovers: int = 0, **settings: Any) -> Any:
        """Run ``body`` on worker 0 while the others serve.

        Arguments:
          body: what to do; it may use whatever a test has at hand.
          leftovers: how many references may be left at the end of each worker; more is a failure.
          settings: for ``init``.

        Returns:
          What ``body`` returned; ``None`` on other ranks of an MPI job.
        """
        import jdistgrad as jd

        def main() -> Any:
            me = jd.init(**settings)
            result = body() if me.rank == 0 else None
            left = jd.shutdown()
            assert len(left) <= leftovers, (
                f"left when the world ended: {left}. Drop references before the body ends, or allow them: "
                "world.drive(body, leftovers=...)"
            )
            return result

        return self.run(main)[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("world_time_limit", "seconds after which a test that uses a world ends the run", default="60")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if launcher_env.launched():
        config.option.basetemp = folder_of_this_rank(config)
    config.addinivalue_line(
        "markers",
        f"world(size, ...): how many workers the test's local world has (default {SIZE}); several sizes: one test "
        "each. Under mpirun: how many ranks it needs at least.",
    )


def folder_of_this_rank(config: pytest.Config) -> pathlib.Path:
    """Where its temporary files go: ranks that end together would clear pytest's common folder under each other.

    A failure on a rank ends the process without any cleaning up: then they can be looked at.
    """
    given = config.option.basetemp
    parent = pathlib.Path(given or tempfile.mkdtemp(prefix="pytest-of-rank-"))
    parent.mkdir(parents=True, exist_ok=True)
    if not given:
        config.add_cleanup(lambda: shutil.rmtree(parent))
    return parent / f"rank{launcher_env.rank()}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each size. Only our own ``world`` needs the size: one of the user's own making is left alone."""
    if "world_size" in metafunc.fixturenames:
        sizes = named_sizes(metafunc.definition.get_closest_marker("world"), metafunc.definition.nodeid)
        here = [ranks(min(sizes))] if launcher_env.launched() else sizes
        metafunc.parametrize("world_size", here, indirect=True, ids=lambda size: f"{size}-workers")


def named_sizes(mark: pytest.Mark | None, test: str) -> tuple[int, ...]:
    sizes = mark.args if mark else (SIZE,)
    if sizes and all(isinstance(size, int) and size > 0 for size in sizes):
        return sizes
    raise pytest.UsageError(f"{test}: @pytest.mark.world takes numbers of workers, as in world(3), not {sizes}")


def ranks(least: int) -> Any:
    """The size of the MPI job, as a parameter that skips its test where the job is too small."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    few = pytest.mark.skipif(size < least, reason=f"needs {least} workers, and this job has {size}")
    return pytest.param(size, marks=few)


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """How many workers the test's world has."""
    return request.param


@pytest.fixture
def world(world_size: int, world_guard: None) -> Iterator[World]:
    """A world of workers, of the sizes that ``@pytest.mark.world`` names."""
    from jdistgrad import shutdown
    from jdistgrad.rpc.worker import find_worker

    yield World(world_size)
    if find_worker() is not None:  # a failed test left it open
        shutdown(graceful=False)


@pytest.fixture
def world_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nobody waits for ever: a test that takes too long ends its process, and a failure on one rank the MPI job."""
    seconds = float(request.config.getini("world_time_limit"))
    timer = threading.Timer(seconds, give_up, [request.node, seconds])
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


def give_up(test: pytest.Item, seconds: float) -> None:
    """Say where every thread is, and end this process; mpirun then ends the others."""
    capture = test.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    print(f"\n{who()}{test.nodeid} has not ended within {seconds:g} s (world_time_limit)", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()
    os._exit(3)


def who() -> str:
    if not launcher_env.launched():
        return ""
    from mpi4py import MPI

    return f"rank {MPI.COMM_WORLD.rank}: "


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """One rank's failure ends the job: the others would wait for it in the next test."""
    report = yield
    if report.failed and "world_guard" in getattr(item, "fixturenames", ()) and launcher_env.launched():
        from mpi4py import MPI

        print(f"\n{who()}{item.nodeid} failed\n{report.longreprtext}", file=sys.stderr, flush=True)
        if MPI.COMM_WORLD.size > 1:
            MPI.COMM_WORLD.Abort(1)
    return report
