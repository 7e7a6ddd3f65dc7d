"""The start of jobs: mpirun's flags, the ranks' environment, the program's arguments, and jobs that are refused."""

import socket
import subprocess
import sys

import pytest

from jdistgrad.cli import launch
from jdistgrad.cli.main import main, split
from jdistgrad.errors import LauncherError

OPEN_MPI = "mpirun (Open MPI) 5.0.11"


@pytest.mark.parametrize("root", [False, True])
def test_open_mpi_is_told_what_it_needs_to_know(root):
    told = launch.flags(OPEN_MPI, root=root)
    assert told[:2] == ["--mca", "ras"]
    assert told[3:] == ["--bind-to", "none", "--oversubscribe", *(["--allow-run-as-root"] if root else [])]


def test_mpich_is_told_to_stay_on_this_machine():
    assert launch.flags("HYDRA build details:\n    Version: 5.0.2", root=True) == ["-launcher", "fork", "-rmk", "user"]


def test_other_mpis_are_told_nothing():
    assert launch.flags("Intel(R) MPI Library", root=True) == []


def test_a_job_stays_on_this_machine_in_an_allocation_of_one_task_on_each_of_two(monkeypatch, capfd):
    node = socket.gethostname()
    allocation = {"JOBID": "1", "JOB_ID": "1", "NODELIST": f"{node},other", "TASKS_PER_NODE": "1(x2)", "NNODES": "2"}
    for name, value in allocation.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert launch.run(3, ["-c", "print('here', flush=True)"]) == 0, capfd.readouterr()
    assert capfd.readouterr().out.count("here") == 3


@pytest.mark.parametrize("n", ["2", 2.5, None, 0])
def test_what_is_no_number_of_ranks_is_refused(n):
    with pytest.raises(LauncherError, match=f"at least one rank, not {n!r}"):
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


def test_ranks_of_one_machine_look_for_no_network_under_libfabric(monkeypatch):
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)
    assert launch.environment(3)["OMPI_MCA_btl"] == "^ofi"


def test_a_message_of_some_kibibytes_does_not_wait_until_it_is_asked_for(monkeypatch):
    monkeypatch.delenv("OMPI_MCA_btl_sm_eager_limit", raising=False)
    assert int(launch.environment(2)["OMPI_MCA_btl_sm_eager_limit"]) > 8192
    monkeypatch.setenv("OMPI_MCA_btl_sm_eager_limit", "4096")
    assert launch.environment(2)["OMPI_MCA_btl_sm_eager_limit"] == "4096"


@pytest.mark.parametrize(
    ("arguments", "ours", "program"),
    [
        (["run", "-n", "3", "a.py", "-n", "5"], ["run", "-n", "3"], ["a.py", "-n", "5"]),
        (["run", "a.py"], ["run"], ["a.py"]),
        (["run", "-n", "3", "-m", "pytest", "-q"], ["run", "-n", "3"], ["-m", "pytest", "-q"]),
        (["run"], ["run"], []),
        (["doctor", "-n", "3"], ["doctor", "-n", "3"], []),
    ],
)
def test_the_programs_arguments_are_its_own(arguments, ours, program):
    assert split(arguments) == (ours, program)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-n", "2"], "what shall be run?"),
        (["run", "-n", "2", "missing.py"], "there is no script 'missing.py' in"),
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
    with pytest.raises(LauncherError, match=r"no mpirun beside this Python and none on PATH\. Install one"):
        launch.find_mpirun()


def test_a_python_without_mpi4py_starts_no_job(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert main(["run", "-c", "pass"]) == 2
    assert "pip install 'jdistgrad[mpi]' for your own MPI" in capsys.readouterr().err


def test_the_exit_status_is_the_jobs():
    command = [sys.executable, "-m", "jdistgrad", "run", "-n", "1", "-c", "raise SystemExit(7)"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 7
