"""The benchmark for GPUs, on CPU devices: it runs as a whole, and prints all of its rows."""

import pathlib

from helpers.jobs import output_of

TABLE = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu" / "table.py"
ROWS = [
    "to pinned host memory",
    "a step on a mesh of one",
    "round trip of 4 B",
    "the note's loop",
    "a step over ",
    "shared memory mapped",
]
ROWS += ["a step in jax.jit", "the average alone, in jax.jit, on_device=True"]


def test_every_row_is_printed(monkeypatch):
    monkeypatch.setenv("JDISTGRAD_COLLECTIVES", "mpi-on-device")
    printed = output_of([str(TABLE), "--rounds", "1"], timeout=300)
    for row in ROWS:
        assert row in printed, printed
