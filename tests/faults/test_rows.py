"""A few faults of every row, and the judging of outcomes. ``make faults`` injects as many as its page says."""

import pytest

from faults import load, program, ranks
from faults.jobs import Ended
from faults.outcomes import HUNG, NAMED, PATIENCE, WRONG
from faults.rows import ROWS

OFTEN = ("killed",)  # tests/jobs has some of the others
NAMES_ONE = "prterun noticed that process rank 1 with PID 7 on node n exited on\nsignal 9 (Killed)."


def with_marks(row):
    return pytest.param(row, id=row.name, marks=() if row.name in OFTEN else pytest.mark.long)


@pytest.mark.parametrize("row", [with_marks(row) for row in ROWS.values() if row.short])
def test_a_few_faults_of_each_row(row, monkeypatch):
    monkeypatch.setenv(PATIENCE, "10")
    outcomes = list(row.inject(row.short, 0))
    assert [one for one in outcomes if not one.good] == []
    assert len(outcomes) == row.short


@pytest.mark.parametrize(
    ("ended", "problem"),
    [
        (Ended(137, NAMES_ONE, 0.3, []), ""),
        (Ended(0, "", 0.1, []), ""),  # the program had ended before
        (Ended(None, NAMES_ONE, None, []), "it stood still"),
        (Ended(137, NAMES_ONE, 9.0, []), "it took 9.0 s"),
        (Ended(137, NAMES_ONE, 0.3, [77]), "the processes [77] are left"),
        (Ended(1, "something failed", 0.3, []), "no message names rank 1"),
        (Ended(1, "", None, []), "no rank was struck, and the exit status was 1"),
        (Ended(137, f"{NAMES_ONE}\n{load.WRONG} call: 1, not 2", 0.3, []), "a number was wrong"),
    ],
)
def test_a_job_with_a_killed_rank_is_judged(ended, problem):
    assert ranks.broken_promise("kill", 1, ended, 5.0) == problem
    assert ranks.judge("kill", 1, ended, "killed", 5.0).good == (not problem)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("worker2 (rank 2) failed", True),
        ("ranks [2] of 3 did not call init", True),
        ("Process name: [prterun-vm-7@1,2]", True),
        ("worker1 (rank 1) failed", False),
        ("ranks [1] of 3 did not call init", False),
        ("rank 21 has", False),
        ("[ranks 1-2] some warning", False),
        ("[ranks 2] some warning", False),
        ("[ranks 0-1] worker2 (rank 2) is lost", True),
    ],
)
def test_the_rank_that_failed_is_found_in_the_output(text, named):
    assert ranks.names(2, text) == named


def test_faults_that_a_job_did_not_come_to_are_told(tmp_path):
    for rank, lines in enumerate(['{"kind": "named", "fault": "a"}\n' * 2, '{"kind": "named", "fault": "a"}\n']):
        (tmp_path / f"notes-{rank}").write_text(lines)
    (tmp_path / "output").write_text("Segmentation fault")
    found = list(program.gathered(tmp_path, 2, 2, 139, "a row"))
    assert [one.kind for one in found] == [NAMED, WRONG]
    assert "status 139 after 1 of 2\nSegmentation fault" in found[1].text
    assert [one.kind for one in program.gathered(tmp_path, 2, 1, None, "a row")] == [NAMED, HUNG]
