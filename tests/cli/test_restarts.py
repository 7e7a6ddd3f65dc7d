"""Jobs that are started again: which, how often, and what is said."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jdistgrad.cli import restarts
from jdistgrad.cli.main import main


@pytest.mark.parametrize(
    ("statuses", "most", "runs", "last"),
    [
        ([0], 3, 1, 0),
        ([137, 1, 0], 3, 3, 0),
        ([1, 1, 1, 1, 0], 3, 4, 1),
        ([1], 0, 1, 1),
        ([2, 0], 3, 1, 2),
        ([143, 0], 3, 1, 143),
        ([-15, 0], 3, 1, -15),
        ([-9, 0], 3, 2, 0),
    ],
    ids=["well", "twice", "too often", "never", "usage", "terminated", "mpirun terminated", "mpirun killed"],
)
def test_what_is_started_again(statuses, most, runs, last, capsys):
    seen = []

    def run(number):
        seen.append(number)
        return statuses[number], False

    assert restarts.attempts(run, most) == last
    assert seen == list(range(runs))
    assert capsys.readouterr().err.count("starting it again") == runs - 1


def test_a_job_that_was_told_to_end_is_not_started_again():
    assert restarts.attempts(lambda number: (1, True), 3) == 1


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (1, "the job ended with status 1"),
        (137, "the job ended with status 137 (a rank was ended by SIGKILL)"),
        (-9, "the job ended with status -9 (mpirun was ended by SIGKILL)"),
        (200, "the job ended with status 200"),
    ],
)
def test_what_is_said(status, said):
    assert restarts.described(status) == said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--restarts", "2", "--local", "-c", "pass"], "only threads of this one"),
        (["--restarts", "-1", "-c", "pass"], "not -1"),
    ],
)
def test_what_makes_no_sense(arguments, message, capsys):
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err


COUNTS = """
import os, signal, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    print("start", os.environ["JDISTGRAD_RESTART"], flush=True)
    if os.environ["JDISTGRAD_RESTART"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1:] == ["waits"]:
        time.sleep(60)
"""


def test_a_job_of_which_a_rank_was_killed_is_started_again(tmp_path):
    command = [sys.executable, "-m", "jdistgrad", "run", "--restarts", "3", "-n", "3", "-c", COUNTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["start", "0", "start", "1"]
    assert (
        "jdistgrad: the job ended with status 137 (a rank was ended by SIGKILL); starting it again, 1 of 3"
        in done.stderr
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_interrupted_is_not_started_again(tmp_path, number):
    command = [sys.executable, "-m", "jdistgrad", "run", "--restarts", "3", "-n", "2", "-c", COUNTS, "waits"]
    output = tmp_path / "output"
    with output.open("w") as file:
        job = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + 30
        while "start 1" not in pathlib.Path(output).read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        (os.killpg if number == signal.SIGINT else os.kill)(job.pid, number)
        assert job.wait(30) != 0
    assert "2 of 3" not in output.read_text()
