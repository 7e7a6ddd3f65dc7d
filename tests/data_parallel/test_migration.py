"""The table of docs/migration.md for users of Horovod: each line runs on every rank."""

import pathlib
import re

import jax.numpy as jnp
import pytest
from helpers.worlds import on_every_worker

import jdistgrad as jd

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "migration.md"


def lines():
    """Return the pieces of code in the right column of the table."""
    table = PAGE.read_text().split("## Coming from Horovod", 1)[1]
    rows = [row.split(" | ", 1)[1] for row in table.splitlines() if row.startswith("| `hvd.")]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row)]


def test_the_table_is_read():
    assert len(lines()) > 25


@pytest.mark.parametrize("code", [code for code in lines() if "jdistgrad run" not in code and code != "jd.init()"])
@on_every_worker
def test_a_line_runs(big_world, code, tmp_path, monkeypatch, rank, size):
    monkeypatch.chdir(tmp_path)
    names = {
        "jd": jd,
        "c": jd.collectives.of_this_world(),
        "dp": jd.DataParallel(),
        "tree": {"a": jnp.full((3, 2), float(rank)), "b": jnp.float32(rank)},
        "rows": jnp.ones((size, 2)),
        "splits": [1] * size,
        "loss": lambda params: params.sum(),
    }
    exec(code, names)
    jd.barrier()
