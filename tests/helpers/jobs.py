"""Finished jobs, and the examples, run as modules, as programs and as jobs."""

import importlib
import os
import pathlib
import subprocess
import sys

import pytest

import jdistgrad
from jdistgrad.cli import launch

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def output_of(command, timeout=60):
    done = subprocess.run(
        [sys.executable, *command],
        text=True,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def as_program(name):
    return output_of([str(EXAMPLES / name)])


ONE_BY_ONE = """
import os, runpy, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
"""


def as_job(n, *names):
    """Run examples, one after the other, as programs of a job."""
    paths = [str(EXAMPLES / name) for name in names]
    program = paths if len(paths) == 1 else ["-c", ONE_BY_ONE, *paths]
    return output_of(["-m", "jdistgrad", "run", "-n", str(n), *program], timeout=60 * len(paths))


# For scripts elsewhere: ``helpers``, and the jdistgrad that is being tested, which may not be the installed one.
TESTS, ROOT = (pathlib.Path(file).parents[1] for file in (__file__, jdistgrad.__file__))
PATH = os.pathsep.join(map(str, (TESTS, ROOT, TESTS / "startup")))

SOONER = {"OMPI_MCA_btl": "^ofi"}  # a second sooner, as `jdistgrad run` explains


class Job:
    """A finished job: its exit status and its output."""

    def __init__(self, process):
        self.status, self.output = process.returncode, process.stdout

    def expect(self, *texts, status=0):
        """Check the exit status (``None``: any failure) and that the output contains all of these texts."""
        assert self.status == status if status is not None else self.status != 0, self.output
        for text in texts:
            assert text in self.output, f"{text!r} is not in\n{self.output}"
        return self


def finished_job(n, script, timeout, environment):
    """Run a script on ``n`` ranks as by a plain mpirun; return the finished job. The script may import ``helpers``."""
    process = launch.attend(
        launch.command(n, [str(script)]),
        env={**SOONER, **os.environ, "PYTHONPATH": PATH, **environment},
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Job(process)
