"""`jdistgrad bench`: it measures worlds of threads and a job, and prints reference numbers beside the results."""

import re
import subprocess
import sys

from jdistgrad.cli import bench, reference


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
