"""The pytest plugin of jdistgrad: the fixture ``world``, for tests of code that runs on several workers.

    @pytest.mark.world(3)
    def test_somebody_else_adds(world):
        assert world.drive(lambda: jd.rpc_sync("worker2", operator.add, args=(1, 2))) in (3, None)

The workers are threads of this process; under mpirun they are the ranks of the job, and every rank runs every test.
Where jdistgrad is installed, every pytest run loads this module: it imports neither jax nor MPI before a test requests
a world.
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

SIZE = 3  # two workers hide mistakes that three reveal
GRACE_SECONDS = 5.0  # between the first and the last of the ranks that stop at the same failure
STOPPED = pytest.StashKey[str]()
TIMER = pytest.StashKey[threading.Timer]()
GUARDED = pytest.StashKey[bool]()  # tests in which a world is open, also one that only a fixture has asked for
RAISED_ELSEWHERE = (
    "If the body of world.drive raised on worker 0, only rank 0 of this job knows. Expect what it raises inside of the "
    "body (with pytest.raises), and skip before drive."
)
A_WORKER_OF_XDIST = (
    "under mpirun the workers of a world are the ranks, and pytest-xdist has started this process in addition: run the "
    "job's tests with -n 0, or with -p no:xdist"
)


class World:
    """The value of the fixture ``world``: runs programs on the workers of a world.

    Attributes:
      size: the number of workers.
    """

    def __init__(self, size: int):
        self.size = size

    def run(self, main: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``main`` on every worker; ``main`` calls ``init`` and ``shutdown`` itself.

        Returns:
          The results of ``main``, by rank; under mpirun a list of this rank's result.
        """
        import jdistgrad as jd

        return [main(*args)] if launcher_env.launched() else jd.spawn(main, self.size, args=args)

    def drive(self, body: Callable[[], Any], *, leftovers: int = 0, **settings: Any) -> Any:
        """Run ``body`` on worker 0 while the others serve.

        Arguments:
          body: a function without arguments; it may be a closure over the test's variables. Expect in it what it
            raises: under mpirun, other ranks have no exception.
          leftovers: how many references each worker may have left at the end; more is a failure.
          settings: arguments of ``init``.

        Returns:
          The result of ``body``; ``None`` on other ranks of an MPI job.
        """
        import jdistgrad as jd

        def main() -> Any:
            me = jd.init(**settings)
            result = body() if me.rank == 0 else None
            try:
                left = jd.shutdown()
            except jd.WorkerLostError as error:
                error.add_note(RAISED_ELSEWHERE)
                raise
            assert len(left) <= leftovers, (
                f"left when the world ended: {left}. Drop references before the body ends, or allow them: "
                "world.drive(body, leftovers=...)"
            )
            return result

        return self.run(main)[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("world_time_limit", "seconds after which a test with a world ends the run; 0: never", default="60")


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests() -> Any:
    """Let each rank have a file of its own for what pytest-cov measures, which starts here."""
    if launcher_env.launched():
        asked = os.environ.get("COVERAGE_FILE", ".coverage")
        os.environ["COVERAGE_FILE"] = f"{asked}-rank{launcher_env.rank()}"
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if launcher_env.launched():
        # A folder for this rank's temporary files: ranks that share one would clear it under each other. A failure on a
        # rank ends its process without cleaning up, so its files remain for inspection.
        given = config.option.basetemp
        parent = pathlib.Path(given or tempfile.mkdtemp(prefix="pytest-of-rank-"))
        parent.mkdir(parents=True, exist_ok=True)
        if not given:
            config.add_cleanup(lambda: shutil.rmtree(parent))
        config.option.basetemp = parent / f"rank{launcher_env.rank()}"
        report = getattr(config.option, "xmlpath", None)  # the first rank's JUnit report has the name asked for
        if report and launcher_env.rank():
            asked = pathlib.Path(report)
            config.option.xmlpath = str(asked.with_stem(f"{asked.stem}.rank{launcher_env.rank()}"))
    config.addinivalue_line(
        "markers",
        f"world(size, ...): how many workers the test's local world has (default {SIZE}); several sizes: one test "
        "each. Under mpirun: how many ranks it needs at least.",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each world size. Only our own ``world`` needs ``world_size``; a user's is left alone."""
    if "world_size" in metafunc.fixturenames:
        sizes, few = sizes_here(metafunc.definition)
        here = [pytest.param(size, marks=pytest.mark.skipif(bool(few), reason=few)) for size in sizes]
        metafunc.parametrize("world_size", here, indirect=True, ids=lambda size: f"{size}-workers")


def sizes_here(test: pytest.Item) -> tuple[tuple[int, ...], str]:
    """Return the sizes of a test's worlds, or of the MPI job, and why the test cannot run in that, or ""."""
    mark = test.get_closest_marker("world")
    sizes = mark.args if mark else (SIZE,)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise pytest.UsageError(f"{test.nodeid}: @pytest.mark.world takes numbers of workers, as world(3), not {sizes}")
    if not launcher_env.launched():
        return sizes, ""
    if hasattr(test.config, "workerinput"):
        raise pytest.UsageError(A_WORKER_OF_XDIST)
    from jdistgrad.wire.mpi_job import WORLD, why_alone

    alone = why_alone()
    if alone:
        raise pytest.UsageError(f"{alone}. To remedy this, {launcher_env.TOGETHER}.")
    few = f"needs {min(sizes)} workers, and this job has {WORLD.size}" if WORLD.size < min(sizes) else ""
    return (WORLD.size,), few


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Return the number of workers in the test's world."""
    if hasattr(request, "param"):
        return request.param
    sizes, few = sizes_here(request.node)  # it got its world by ``request.getfixturevalue("world")``
    if few:
        pytest.skip(few)
    if len(sizes) > 1:
        said = f"{request.node.nodeid}: for a world of each size, {sizes}, give the test a parameter `world`"
        pytest.fail(said, pytrace=False)
    return sizes[0]


@pytest.fixture
def world(world_size: int, world_guard: None) -> Iterator[World]:
    """Yield a world of workers, of each size in ``@pytest.mark.world``."""
    from jdistgrad.rpc.leaving import shutdown
    from jdistgrad.rpc.worker import find_worker

    before = find_worker()  # of a fixture of another scope
    yield World(world_size)
    if find_worker() not in (None, before):  # a failed test left it open
        shutdown(graceful=False)


@pytest.fixture
def world_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the process if the test takes too long. A failure on one rank of a test with this guard ends the MPI job."""
    request.node.stash[GUARDED] = True
    seconds = float(request.config.getini("world_time_limit"))
    timer = threading.Timer(seconds, give_up, [request.node, seconds])
    timer.daemon = True
    if 0 < seconds <= threading.TIMEOUT_MAX:
        timer.start()
    request.config.stash[TIMER] = timer
    yield
    timer.cancel()


def pytest_enter_pdb(config: pytest.Config) -> None:
    """Let the test take its time from now on: somebody looks at it."""
    if TIMER in config.stash:
        config.stash[TIMER].cancel()


def give_up(test: pytest.Item, seconds: float) -> None:
    """Print where every thread is, and end this process; mpirun then ends the other ranks."""
    capture = test.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    print(f"\n{who()}{test.nodeid} has not ended within {seconds:g} s (world_time_limit)", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()
    os._exit(3)


def who() -> str:
    if not launcher_env.launched():
        return ""
    from jdistgrad.wire.mpi_job import WORLD

    return f"rank {WORLD.rank}: "


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """End the MPI job when a test fails on one rank: the others would wait for it in the next test."""
    report = yield
    guarded = GUARDED in item.stash or "world_guard" in getattr(item, "fixturenames", ())
    if report.failed and guarded and launcher_env.launched():
        from jdistgrad.wire.mpi_job import WORLD

        print(f"\n{who()}{item.nodeid} failed\n{report.longreprtext}", file=sys.stderr, flush=True)
        if WORLD.size > 1:
            WORLD.Abort(1)
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note that this run stops before its end: at -x, --maxfail, Ctrl-C, an error of the collection."""
    why = session.shouldfail or session.shouldstop
    if why or exitstatus == pytest.ExitCode.INTERRUPTED:
        session.config.stash[STOPPED] = str(why or "interrupted")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the MPI job if only some of its ranks stop early: the others would wait for them in the next test."""
    if STOPPED in config.stash and launcher_env.launched() and "mpi4py.MPI" in sys.modules:
        from jdistgrad.wire.mpi_job import MPIJob, missing_at_the_end

        missing = missing_at_the_end(GRACE_SECONDS)
        if missing:
            MPIJob.end(f"{who()}pytest stopped ({config.stash[STOPPED]}), and did not on ranks {missing}")
