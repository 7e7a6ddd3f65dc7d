"""A few faults of every row, and the judging of outcomes. ``make faults`` injects as many as its page says."""

import json

import pytest

from faults import load, program, ranks, steps, steps_survived, survivors_load
from faults.jobs import Ended
from faults.outcomes import HUNG, NAMED, PATIENCE, SURVIVED, WRONG, Outcome, counted, table
from faults.rows import ROWS
from faults.survivors import Struck

OFTEN = "killed", "ending", "survived kills"
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


def test_a_rank_that_ends_by_itself_must_end_the_job():
    assert ranks.broken_promise("exit", 1, Ended(0, "", 0.1, []), 5.0) == "its exit status was 0"


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


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, ""),
        ({"digests": ["a", "b", "x"], "again": ["x"]}, "rank 3 has taken other steps: 3 and 3 in number, different"),
        (
            {"sizes": [4, 4, 3, 3], "digests": ["a", "b", "c", "d"], "ended": [0, 1, 2, 3]},
            "rank 3 has taken other steps",
        ),
        ({"again": ["x"]}, "rank 3: the steps without the lost have other bits"),
        ({"left": ["a reference"]}, "rank 3: ['a reference']"),
        ({"ended": [0.0, 1.0, 3.0]}, "the first good step came after 1.50 s"),
    ],
)
def test_survivors_of_a_data_parallel_step_are_judged(changed, problem):
    good = {"sizes": [4, 4, 3], "digests": ["a", "b", "c"], "ended": [0.0, 1.0, 2.0], "again": ["c"], "left": []}
    reports = [(0, good), (1, good), (3, good | changed)]
    said = [f"{survivors_load.STRUCK}[2, 1.5]", *(survivors_load.SURVIVOR + json.dumps(report) for report in reports)]
    found = steps_survived.judge(Struck(4, {2}, Ended(0, "\n".join(said), None, []), ""))
    assert found.text.startswith(problem)
    assert found.good == (not problem)


def test_steps_that_differ_must_be_told():
    same, other = ["sum"], ["barrier"]
    said, silent = Ended(1, "DisagreementError: ...", None, []), Ended(1, "Killed", None, [])
    assert steps.judge(said, [same, same, other], "").kind == NAMED
    assert steps.judge(silent, [same, same, other], "").kind == WRONG
    assert steps.judge(Ended(0, "", None, []), [same, same, other], "").kind == WRONG
    assert steps.judge(Ended(0, "", None, []), [same, same, same], "").kind == SURVIVED
    assert steps.judge(said, [same, same, same], "").kind == WRONG
    assert steps.judge(Ended(None, "", None, []), [same, same, same], "").kind == HUNG


def test_the_worst_of_what_the_ranks_saw_decides():
    seen = [Outcome(NAMED, "a fault"), Outcome(WRONG, "a fault", "a number"), Outcome(SURVIVED, "a fault")]
    found = program.joined(seen)
    assert found.kind == WRONG
    assert "rank 1: wrong a number" in found.text
    assert program.joined([seen[2], seen[0]]).kind == NAMED


def test_faults_that_a_job_did_not_come_to_are_told(tmp_path):
    for rank, lines in enumerate(['{"kind": "named", "fault": "a"}\n' * 2, '{"kind": "named", "fault": "a"}\n']):
        (tmp_path / f"notes-{rank}").write_text(lines)
    (tmp_path / "output").write_text("Segmentation fault")
    found = list(program.gathered(tmp_path, 2, 2, 139, "a row"))
    assert [one.kind for one in found] == [NAMED, WRONG]
    assert "status 139 after 1 of 2\nSegmentation fault" in found[1].text
    assert [one.kind for one in program.gathered(tmp_path, 2, 1, None, "a row")] == [NAMED, HUNG]


def test_outcomes_are_counted_and_shown():
    outcomes = [Outcome(NAMED, "x", seconds=2.0), Outcome(NAMED, "x", seconds=1.0), Outcome(HUNG, "x", seconds=40.0)]
    assert counted(outcomes) == {"injected": 3, "named": 2, "survived": 0, "hung": 1, "wrong": 0}
    assert list(table({"killed": outcomes}))[2] == "| killed | 3 | 2 | 0 | 1 | 0 | 2.0 s, at most 40.0 s |"
