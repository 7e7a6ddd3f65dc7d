"""The pytest plugin, as used by a project that has only installed the package."""

import os
import pathlib
import subprocess
import sys
import textwrap
from xml.etree import ElementTree

import pytest

from jdistgrad.cli import launch

ADDS = """
    import operator
    import pytest
    import jdistgrad as jd

    @pytest.mark.world(1, 3)
    def test_the_last_one_adds(world):
        answer = world.drive(lambda: jd.rpc_sync(world.size - 1, operator.add, args=(world.size, 2)))
        assert answer in (world.size + 2, None)

    @pytest.mark.world(3)
    def test_all_run_the_program(world):
        def main(step):
            me = jd.init()
            answer = jd.rpc_sync((me.rank + step) % 3, operator.neg, args=(me.rank,))
            jd.shutdown()
            return me.rank, answer

        results = world.run(main, 2)
        assert all(answer == -rank for rank, answer in results)
        print("ranks here:", [rank for rank, _ in results])

    @pytest.mark.world(4)
    def test_of_four(world):
        assert world.size == 4
"""

FILES = """
    import os

    def test_files(world, tmp_path):
        print("measured in", os.environ.get("COVERAGE_FILE"))
        print("files in", tmp_path)
"""

SCOPES = """
    @pytest.fixture(scope="module")
    def mine():
        with jd.local_workers(2):
            yield

    def test_between(mine, world):
        assert world.drive(lambda: jd.world_size()) == 3

    def test_mine(mine):
        assert jd.rpc_sync(1, operator.neg, args=(1,)) == -1
"""


@pytest.fixture
def user_tests(tmp_path):
    """Return a function that runs a test file of another project, in one process or on some ranks."""

    def run(source, *, ranks=0, fails=False, time_limit=60, options=(), keys=""):
        (tmp_path / "test_user.py").write_text(textwrap.dedent(source))
        (tmp_path / "pytest.ini").write_text(f"[pytest]\nworld_time_limit = {time_limit}\n")
        pytest_command = ["-m", "pytest", "--color=no", "-rs", "-s", "-v", "-p", "no:cacheprovider", *options]
        command = launch.command(ranks, pytest_command) if ranks else [sys.executable, *pytest_command]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, input=keys, text=True, capture_output=True, check=False
        )
        output = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, output
        return output

    return run


def test_worlds_of_the_sizes_that_are_named(user_tests):
    """And without a limit of time; and the world of a fixture of another scope stays open."""
    output = user_tests(ADDS + SCOPES, time_limit="inf", options=["-W", "error"])
    assert "6 passed" in output
    for test in ("adds[1-workers] PASSED", "adds[3-workers] PASSED", "program[3-workers] ranks here: [0, 1, 2]"):
        assert test in output


def check_files(output, *, stay):
    folders = {line.split()[-1] for line in output.splitlines() if "files in" in line}
    assert len(folders) == 3
    assert all(pathlib.Path(folder).exists() == stay for folder in folders)
    assert all(f"measured in .coverage-rank{rank}" in output for rank in range(3))


def test_under_mpirun_the_ranks_there_are(user_tests, tmp_path):
    """They do not share temporary files or reports. A test that needs more of them is skipped, and says why."""
    output = user_tests(ADDS + FILES, ranks=3, options=["--junitxml", "told/report.xml"])
    assert output.count("3 passed, 1 skipped") == 3
    assert all(f"ranks here: [{rank}]" in output for rank in range(3))
    assert "needs 4 workers, and this job has 3" in output
    check_files(output, stay=False)
    reports = sorted((tmp_path / "told").iterdir())
    assert [one.name for one in reports] == ["report.rank1.xml", "report.rank2.xml", "report.xml"]
    assert all(ElementTree.parse(one).getroot().find("testsuite").get("tests") == "4" for one in reports)


def test_processes_that_mpi_does_not_bring_together_skip_nothing(user_tests, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")  # as srun does, whose processes need not be ranks of one job
    output = user_tests(ADDS, fails=True, options=["-k", "all_run_the_program"])  # which needs three workers
    assert "it has started 3 processes (SLURM_STEP_NUM_TASKS), but MPI finds" in output


def test_a_process_that_xdist_adds_to_a_rank_takes_no_place_in_the_job(user_tests, tmp_path):
    (tmp_path / "conftest.py").write_text("def pytest_configure(config): config.workerinput = {}")  # as xdist does
    output = user_tests("def test_it(world): pass", ranks=1, fails=True)
    assert "pytest-xdist has started this process in addition: run the job's tests with -n 0" in output


INDIRECT = """
    import pytest
    import jdistgrad as jd

    @pytest.fixture
    def indirect(request):
        return request.getfixturevalue("world")

    @pytest.mark.world(2)
    def test_of_two(indirect):
        assert indirect.drive(lambda: jd.rpc_sync(indirect.size - 1, abs, args=(-5,))) in (5, None)
        print("workers:", indirect.size)

    @pytest.mark.world(4)
    def test_of_four(indirect):
        print("workers:", indirect.size)
"""


def test_a_fixture_of_ranks_may_ask_for_the_world(user_tests):
    output = user_tests(INDIRECT + FILES, ranks=3, options=["--basetemp", "files"])
    assert output.count("workers: 3") == 3
    assert output.count("2 passed, 1 skipped") == 3
    assert "needs 4 workers, and this job has 3" in output
    check_files(output, stay=True)


def test_worlds_of_several_sizes_are_parameters(user_tests):
    output = user_tests(INDIRECT.replace("world(4)", "world(3, 4)"), fails=True)
    assert "test_of_four: for a world of each size, (3, 4), give the test a parameter `world`" in output


def test_one_ranks_failure_ends_the_job(user_tests):
    output = user_tests(
        """
        from mpi4py import MPI

        def test_one_fails(world):
            assert MPI.COMM_WORLD.rank != 1, "boom"
            MPI.COMM_WORLD.Barrier()

        def test_the_others_would_wait_here(world):
            MPI.COMM_WORLD.Barrier()
        """,
        ranks=3,
        fails=True,
        time_limit=20,
    )
    assert "has not ended" not in output
    assert "rank 1: test_user.py::test_one_fails[3-workers] failed" in output
    assert "AssertionError: boom" in output


STOPS = """
    import jdistgrad as jd

    def test_some_fail():
        assert jd.rank() not in {ranks}

    def test_the_others_would_wait_here(world):
        world.drive(lambda: None)
"""


def test_a_rank_that_stops_alone_ends_the_job(user_tests):
    output = user_tests(STOPS.format(ranks=[1]), ranks=3, fails=True, time_limit=30, options=["-x"])
    assert "rank 1: pytest stopped (stopping after 1 failures), and did not on ranks [0, 2]; ending the job" in output
    assert "has not ended" not in output


def test_ranks_that_stop_together_end_as_without_mpi(user_tests):
    output = user_tests(STOPS.format(ranks=[0, 1, 2]), ranks=3, fails=True, options=["-x"])
    assert output.count("1 failed in") == 3
    assert "ending the job" not in output


def test_ranks_that_run_different_tests_say_so(user_tests):
    output = user_tests(
        """
        import pytest
        import jdistgrad as jd

        @pytest.mark.parametrize("k", [1, 0] if jd.rank() == 2 else [0, 1])
        def test_it(world, k):
            world.drive(lambda: None)
        """,
        ranks=3,
        fails=True,
    )
    told = (
        "disagree on the test: rank 0 has test_user.py::test_it[3-workers-0] (call), rank 2 has "
        "test_user.py::test_it[3-workers-1] (call). Every rank must run the same tests in the same order"
    )
    assert told in output


def test_a_test_that_waits_for_ever_is_ended_and_says_where_it_stood(user_tests):
    output = user_tests(
        """
        import threading
        from jdistgrad import spawn  # loads JAX before the time runs

        def test_waits(world):
            world.drive(threading.Event().wait)
        """,
        fails=True,
        time_limit=4,
    )
    assert "test_user.py::test_waits[3-workers] has not ended within 4 s (world_time_limit)" in output
    assert "in drive" in output


def test_a_test_in_the_debugger_takes_its_time(user_tests):
    source = """
        from jdistgrad import spawn  # loads JAX before the time runs

        def test_it(world):
            breakpoint()
    """
    keys = "import time; time.sleep(3); print('still', 'here')\nc\n"
    output = user_tests(source, time_limit=2, keys=keys)
    assert "still here" in output


def test_who_does_not_use_it_is_not_disturbed(user_tests):
    output = user_tests(
        """
        import sys
        import pytest

        @pytest.fixture
        def world():
            return "of my own"

        def test_nothing_is_imported_and_nothing_replaced(world):
            assert world == "of my own"
            assert not {"jax", "mpi4py.MPI"} & set(sys.modules)
        """
    )
    assert "1 passed" in output
