"""The start of jobs: mpirun's flags, the ranks' environment, the program's arguments, refusals, and starting again."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from jdistgrad.cli import launch
from jdistgrad.cli.main import main, parser, program_of
from jdistgrad.errors import LauncherError

OPEN_MPI = "mpirun (Open MPI) 5.0.11"


@pytest.mark.parametrize("root", [False, True])
def test_open_mpi_is_told_what_it_needs_to_know(root):
    told = launch.flags(OPEN_MPI, root=root)
    assert told[:2] == ["--mca", "ras"]
    assert told[3:] == ["--bind-to", "none", "--oversubscribe", *(["--allow-run-as-root"] if root else [])]


def test_an_older_open_mpi_goes_on_without_no_rank():
    assert launch.flags(OPEN_MPI, root=False, survive=True)[-2:] == ["--with-ft", "ulfm"]
    with pytest.raises(LauncherError):
        launch.flags("mpirun (Open MPI) 4.1.6", root=False, survive=True)


def test_mpich_is_told_to_stay_on_this_machine_and_others_are_told_nothing():
    assert launch.flags("HYDRA build details:\n    Version: 5.0.2", root=True) == ["-launcher", "fork", "-rmk", "user"]
    assert launch.flags("Intel(R) MPI Library", root=True) == []


def test_a_job_stays_on_this_machine_in_an_allocation_of_one_task_on_each_of_two(monkeypatch, capfd):
    node = socket.gethostname()
    allocation = {"JOBID": "1", "JOB_ID": "1", "NODELIST": f"{node},other", "TASKS_PER_NODE": "1(x2)", "NNODES": "2"}
    for name, value in allocation.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert launch.run(3, ["-c", "print('here', flush=True)"]) == 0, capfd.readouterr()
    assert capfd.readouterr().out.count("here") == 3


@pytest.mark.parametrize("n", ["2", 0])
def test_what_is_no_number_of_ranks_is_refused(n):
    with pytest.raises(LauncherError):
        launch.mpirun(n)


@pytest.mark.parametrize(("n", "cores", "threads"), [(1, 8, "8"), (3, 8, "2"), (4, 2, "1")])
def test_ranks_share_the_cores(n, cores, threads):
    assert launch.surroundings(n, cores)["NPROC"] == threads


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("NPROC", "5")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    assert launch.environment(2)["NPROC"] == "5"
    assert launch.environment(2)["MALLOC_TRIM_THRESHOLD_"] == str(launch.KEPT_BYTES)
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
    assert launch.environment(2)["OMPI_MCA_btl"] == "self,tcp"


def test_the_threads_for_the_workers_of_one_process_are_not_for_the_ranks_that_it_starts(monkeypatch):
    # As a notebook does by `!jdistgrad run`, which inherits the notebook's environment.
    monkeypatch.delenv("NPROC", raising=False)
    code = "import jax, jdistgrad; from jdistgrad.cli import launch; print(launch.environment(1000)['NPROC'])"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout == "1\n"


@pytest.mark.parametrize(
    ("arguments", "n", "program"),
    [
        (["-n", "3", "a.py", "-n", "5"], 3, ["a.py", "-n", "5"]),
        (["-n", "3", "-m", "pytest", "-q", "-n", "0"], 3, ["-m", "pytest", "-q", "-n", "0"]),
        (["--local", "-c", "pass", "--local"], 2, ["-c", "pass", "--local"]),
        ([], 2, []),
    ],
)
def test_the_programs_arguments_are_its_own(arguments, n, program):
    options = parser().parse_args(["run", *arguments])
    assert (options.n, program_of(options)) == (n, program)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--restarts", "2", "--local", "-c", "pass"], "only threads of this one"),
        (["run", "--restarts", "-1", "-c", "pass"], "not -1"),
        (["run", "-n", "0", "-c", "pass"], "at least one rank, not 0"),
        (["run", "--hostfile", "hosts", "-n", "4", "a.py"], "--hostfile is no option of `jdistgrad run`"),
        (["run", "-H", "node0,node1", "a.py"], "mpirun --hostfile hosts -n 8 python program.py"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_machine_without_mpi_is_told_how_to_get_one(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LauncherError, match="Install one"):
        launch.find_mpirun()


def test_a_python_without_mpi4py_starts_no_job(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert main(["run", "-c", "pass"]) == 2
    assert "pip install 'jdistgrad[mpi]' for your own MPI" in capsys.readouterr().err


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

    assert launch.attempts(run, most) == last
    assert seen == list(range(runs))
    told = capsys.readouterr().err
    assert told.count("starting it again") == runs - 1
    assert ("status 137 (a rank was ended by SIGKILL)" in told) == (statuses[0] == 137)
    assert ("status -9 (mpirun was ended by SIGKILL)" in told) == (statuses[0] == -9)


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


def test_a_job_that_is_interrupted_is_not_started_again(tmp_path):
    command = [sys.executable, "-m", "jdistgrad", "run", "--restarts", "3", "-n", "2", "-c", COUNTS, "waits"]
    output = tmp_path / "output"
    with output.open("w") as file:
        job = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + 30
        while "start 1" not in pathlib.Path(output).read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait(30) != 0
    assert "2 of 3" not in output.read_text()
