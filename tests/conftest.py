"""Configuration of the suite, for worlds of threads of this process and for MPI jobs that pytest was started in.

pytest                            # local worlds of 3 workers, and of 1 worker where that differs
jdistgrad run -n 3 -m pytest      # the ranks of the job; every rank runs every test that uses a world
"""

import gc
import itertools
import signal
import textwrap

import hypothesis
import jax
import pytest
from helpers.jobs import finished_job
from helpers.unruly import make_all_unruly

import jdistgrad as jd
from jdistgrad.config import settings
from jdistgrad.wire import launcher_env

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

MODULES = itertools.count()
SIZES = [1] if launcher_env.launched() else [3]  # under mpirun any number of ranks will do; the suite runs with 1 to 4

if not launcher_env.launched():
    jax.config.update("jax_num_cpu_devices", 8)
elif settings.devices:  # `make test-devices-3`: jax.distributed must start before the first array of any test module
    jd.init()
    jd.shutdown()


def pytest_addoption(parser):
    parser.addoption(
        "--unruly",
        type=int,
        metavar="SEED",
        help="deliver some messages of every world late, drawn from a seed",
    )


def pytest_sessionstart(session):
    """Set the world sizes of tests that have no ``world`` marker."""
    session.add_marker(pytest.mark.world(*SIZES))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    if "big_world" in metafunc.fixturenames:
        metafunc.definition.add_marker(pytest.mark.world(3))


def pytest_configure(config):
    config.addinivalue_line("markers", "host_memory: a test of what collectives do in host memory, not over devices")
    config.addinivalue_line("markers", "over_devices: a test of what collectives do over devices only")
    if config.getoption("unruly") is not None:
        make_all_unruly(config.getoption("unruly"))


def pytest_collection_modifyitems(config, items):
    """Deselect tests that other runs have.

    Under mpirun: tests that need no ranks, and, unless there are 3 ranks, tests of exactly 3 workers. Where
    gradients stay on devices: tests of what happens in host memory; else tests of what happens over devices.
    """
    elsewhere = {"devices": ["host_memory"], "mpi-on-device": ["host_memory", "over_devices"]}
    markers = elsewhere.get(settings.collectives, ["over_devices"])
    left_out = {item for item in items if any(map(item.get_closest_marker, markers))}
    if launcher_env.launched():
        three = mpi_size() == 3
        left_out |= {
            item for item in items if not needs_ranks(item) or ("big_world" in item.fixturenames and not three)
        }
    config.hook.pytest_deselected(items=list(left_out))
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
    """Return a world of three workers, for tests to which another size would add nothing."""
    return world


@pytest.fixture(autouse=True, scope="module")
def freeze_loaded_objects():
    """Exclude loaded objects from garbage collection: a world collects when it ends, in 5 ms instead of 100 ms."""
    number = next(MODULES)
    if number % 40 == 0:  # what earlier modules loaded may be garbage now; a look at all of it takes seconds
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    yield
    if number % 6 == 5:  # what modules have compiled would take gibibytes in the end; each clearing takes 0.1 s
        jax.clear_caches()


@pytest.fixture(autouse=True)
def freeze_what_a_world_has_left(request):
    """Exclude what a test has left, mostly compiled programs: its world has just collected the garbage."""
    yield
    if "world" in request.fixturenames:
        gc.freeze()


@pytest.fixture(autouse=True)
def every_test_is_guarded(world_guard):
    """Guard every test: tests marked ``every_rank`` use no world, but run on all ranks and so need the guard too."""


@pytest.fixture(autouse=True)
def interruptible():
    """Let Ctrl-C raise KeyboardInterrupt, even if the suite runs in the background or a test left another handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def mpi_job(tmp_path):
    """Return a function that runs a program on ``n`` ranks as a separate job, for failures that would end pytest."""

    def run(n, source, *, timeout=60, **environment):
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(source))
        return finished_job(n, script, timeout, environment)

    return run
