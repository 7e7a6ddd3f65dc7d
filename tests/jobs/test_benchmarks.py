"""Every job of the benchmarks, in a short form: it runs and reports. Those of the same ranks share one job of MPI."""

import json
import pathlib

import pytest
from helpers.jobs import output_of

JOBS = pathlib.Path(__file__).parents[2] / "benchmarks" / "jobs"
ALL = {path.stem for path in JOBS.glob("*.py")}
NEED_TORCH = {name for name in ALL if name.endswith("_torch")}  # make bench runs them
TOGETHER = {
    "one rank": (1, "data_parallel_curves halves_jdistgrad"),
    "two ranks": (
        2,
        "calls_floor calls_jdistgrad calls_mpi compiled_pipeline_jdistgrad data_parallel_alone data_parallel_jdistgrad "
        "data_parallel_mpi gradients_jdistgrad pipelines_jdistgrad sharding_jdistgrad surviving_jdistgrad "
        "tesseract_jdistgrad",
    ),
    "one thread a rank": (2, "stages_jdistgrad"),
    "surviving": (2, "surviving_parts_jdistgrad"),
    "over devices": (2, "devices_jdistgrad"),
    "three ranks": (3, "two_shards_jdistgrad"),
}
PROGRAM = """
import os, runpy, sys, time

sys.path.insert(0, JOBS)
for name in NAMES:
    start = time.monotonic()
    runpy.run_path(f"{JOBS}/{name}.py", run_name="__main__")
    print("ended", name, f"{time.monotonic() - start:.1f} s", flush=True)
"""


def test_every_job_is_run_somewhere():
    assert {name for _, names in TOGETHER.values() for name in names.split()} == ALL - NEED_TORCH


@pytest.mark.parametrize("group", TOGETHER)
def test_jobs_run_and_report(group, tmp_path, monkeypatch):
    n, names = TOGETHER[group]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("JOBS", repr(str(JOBS))).replace("NAMES", repr(names.split())))
    monkeypatch.setenv("JDISTGRAD_BENCH", "--short")
    survive = ["--survive"] if group == "surviving" else []
    output = output_of(["-m", "jdistgrad", "run", *survive, "-n", str(n), str(program)], timeout=120)
    assert [name for name in names.split() if f"ended {name}" not in output] == []
    reports = [json.loads(line.removeprefix("measured: ")) for line in output.splitlines() if "measured: " in line]
    assert len(reports) >= len(names.split())
    assert all(reports)
