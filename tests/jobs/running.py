"""How the tests get at the examples: as modules, as programs and as jobs."""

import importlib
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def output_of(command):
    done = subprocess.run(
        [sys.executable, *command], text=True, timeout=60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def as_program(name):
    return output_of([str(EXAMPLES / name)])


def as_job(n, name):
    return output_of(["-m", "jdistgrad", "run", "-n", str(n), str(EXAMPLES / name)])
