"""`jdistgrad bench`: it measures worlds of threads and a job, and prints reference numbers beside the results."""

import re
import subprocess
import sys

import pytest

from jdistgrad.cli import bench
from jdistgrad.cli.main import main


def test_the_table_has_every_number_beside_the_reference():
    command = [sys.executable, "-m", "jdistgrad", "bench", "-n", "3"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    threads, job = printed.split("3 processes under mpirun")
    for kind, part in enumerate((threads, job)):
        rows = dict(re.findall(r"^  (.+?)  +([\d.]+) [um]s ", part, re.MULTILINE))
        assert set(rows) == set(bench.REFERENCE)
        assert all(float(one) > 0 for one in rows.values())
        assert all(f"{bench.spell(seconds[kind])}" in part for seconds in bench.REFERENCE.values())


@pytest.mark.parametrize(("n", "said"), [("0", "a world has from 1 to"), ("1000", "1000 workers are too many")])
def test_no_possible_size_is_refused(n, said, capsys):
    assert main(["bench", "-n", n]) == 2
    assert said in capsys.readouterr().err
