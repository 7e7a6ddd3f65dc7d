"""`jdistgrad bench`: it measures worlds of threads and a job, and prints reference numbers beside the results."""

import re
import subprocess
import sys

import pytest

from jdistgrad.cli import bench, reference
from jdistgrad.cli.main import main


def test_the_table_has_every_number_beside_the_reference():
    command = [sys.executable, "-m", "jdistgrad", "bench", "-n", "3"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    threads, job = printed.split("3 processes under mpirun")
    for part, known in ((threads, reference.LOCAL), (job, reference.JOB)):
        rows = dict(re.findall(r"^  (.+?)  +([\d.]+) [um]s ", part, re.MULTILINE))
        assert set(rows) == set(known)
        assert all(float(one) > 0 for one in rows.values())
        assert all(f"{bench.spell(seconds)}" in part for seconds in known.values())


def test_a_machine_without_mpi_gets_the_other_half(monkeypatch, capsys):
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    assert bench.main(3) == 1
    told = capsys.readouterr()
    assert "gradient, jd.jit" in told.out
    assert "no job was measured: there is no mpirun" in told.err


@pytest.mark.parametrize(("n", "said"), [("0", "a world has from 1 to"), ("1000", "1000 workers are too many")])
def test_no_possible_size_is_refused(n, said, capsys):
    assert main(["bench", "-n", n]) == 2
    assert said in capsys.readouterr().err


BEFORE = "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 50 0 50 400 0 0 0 0 0 0\n"


@pytest.mark.parametrize(
    ("after", "share"),
    [
        ("cpu  100 0 100 1000 0 0 0 0 0 0\n", 0.0),
        ("cpu  150 0 150 900 0 0 0 0 0 0\n", 0.5),
        ("cpu  100 0 100 850 50 0 0 100 0 0\n", 0.5),  # waiting for a disk is idle; another virtual machine is not
        (BEFORE, 0.0),
    ],
)
def test_the_busy_share_of_the_cores(after, share):
    assert bench.busy_share(BEFORE, after) == pytest.approx(share)


def test_a_busy_machine_is_reported(monkeypatch, tmp_path, capsys):
    readings = iter([BEFORE, "cpu  280 0 100 820 0 0 0 0 0 0\n"] * 2)
    monkeypatch.setattr(bench, "BUSY_SECONDS", 0)
    monkeypatch.setattr(bench, "BUSY_FILE", type("File", (), {"read_text": lambda self: next(readings)})())
    bench.warn_if_busy()
    assert "other programs use 90% of its cores" in capsys.readouterr().out
    monkeypatch.setattr(bench, "BUSY_SHARE", 0.95)
    bench.warn_if_busy()
    assert capsys.readouterr().out == ""
