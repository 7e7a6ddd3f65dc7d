"""The removal of MPI's boxes from the error output of a job."""

import random

import pytest

from jdistgrad.cli.boxes import BoxFilter

RULE = "-" * 74 + "\n"
NAMED = "jdistgrad: worker1 (rank 1) failed: ValueError: boom; ending the job\n"
ABORT = (
    RULE
    + "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Proc: [[39574,1],1]\n  Errorcode: 1\n\n"
    + "NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.\n"
    + RULE
)
EXITED = RULE + 'prterun has exited due to process rank 1 with PID 0 on node a calling\n"abort".\n' + RULE
TABLE = RULE + "loss   accuracy\n" + RULE


def filtered(text, *cuts):
    without, parts, data = BoxFilter(), [], text.encode()
    for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
        parts.append(without(data[start:end]))
    return b"".join([*parts, without.end()]).decode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("before\n" + NAMED + ABORT + EXITED, "before\n" + NAMED),
        (NAMED + "between\n" + ABORT + "after\n" + EXITED + "end", NAMED + "between\nafter\nend"),
        (NAMED + TABLE + ABORT, NAMED + TABLE),
        (ABORT + EXITED, ABORT + EXITED),  # nobody has said why
        (TABLE + NAMED, TABLE + NAMED),
        (NAMED + RULE + "cut off", NAMED + RULE + "cut off"),
        (NAMED + RULE + "no box\n" * 60, NAMED + RULE + "no box\n" * 60),
        (NAMED + ABORT + "\0", NAMED),
        (ABORT + EXITED + "\0", ABORT + EXITED),
        ("a\0\0b\n", "a\0\0b\n"),
        ("", ""),
    ],
)
def test_boxes_go_once_the_cause_is_named(text, expected):
    assert filtered(text) == expected
    assert filtered(text, *range(1, len(text))) == expected
    for seed in range(20):
        cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=5))
        assert filtered(text, *cuts) == expected


def test_before_the_cause_everything_passes_at_once():
    without = BoxFilter()
    for part in (b"progress 1%\r", b"-", b"----------------------------", b"\nMPI_ABORT"):
        assert without(part) == part
