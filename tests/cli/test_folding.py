"""Equal lines of several ranks, folded into one."""

import os
import random
import subprocess

import pytest

from jdistgrad.cli import copier
from jdistgrad.cli.folding import HOLD_SECONDS, Folding, spelled

TRACEBACK = "Traceback\n  File a\n    ^^^^\n  File b\n    ^^^^\nValueError\n"


def folded(*pieces, size=3):
    """Return what is printed of pieces (rank, text), each a hundredth of a second after the one before."""
    folding, now, printed = Folding(size), 0.0, b""
    for rank, text in pieces:
        now += 0.01
        folding.take(rank, text.encode(), now)
        printed += folding.ready(now)
    return (printed + folding.end()).decode()


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([(0, "a\n"), (1, "a\n"), (2, "a\n")], "[ranks 0-2] a\n"),
        ([(2, "a\n"), (0, "a\n"), (1, "b\n")], "[ranks 0, 2] a\nb\n"),
        ([(0, "a\n"), (0, "a\n"), (0, "b\n")], "a\na\nb\n"),  # one rank says it twice
        ([(0, "a\nb\n"), (1, "b\na\n")], "a\n[ranks 0-1] b\na\n"),  # each rank's order is kept
        ([(0, "a\n"), (None, "mpirun\n"), (1, "a\n")], "[ranks 0-1] a\nmpirun\n"),
        ([(0, "a"), (1, "a\n"), (0, "\n")], "[ranks 0-1] a\n"),  # lines arrive in pieces
        ([(0, "a\nno end"), (1, "a\nno end")], "[ranks 0-1] a\nno endno end"),
        ([], ""),
    ],
)
def test_equal_lines_are_printed_once_with_the_ranks(pieces, expected):
    assert folded(*pieces) == expected


def test_a_traceback_is_folded_however_the_ranks_mix():
    for seed in range(50):
        draw = random.Random(seed)
        left = dict.fromkeys(range(3), TRACEBACK)
        folding, printed = Folding(3), b""
        while any(left.values()):
            rank = draw.choice([rank for rank in left if left[rank]])
            length = draw.randint(1, 20)
            folding.take(rank, left[rank][:length].encode(), 0.1)
            left[rank] = left[rank][length:]
            printed += folding.ready(0.1)
        expected = "".join(f"[ranks 0-2] {line}" for line in TRACEBACK.splitlines(keepends=True))
        assert (printed + folding.end()).decode() == expected


def test_nothing_of_a_rank_is_lost_or_put_out_of_order():
    for seed in range(50):
        draw = random.Random(seed)
        said = {rank: [draw.choice("abc") for _ in range(12)] for rank in range(3)}
        pieces = [rank for rank in said for _ in range(12)]
        draw.shuffle(pieces)
        lines = {rank: iter(said[rank]) for rank in said}
        printed = folded(*((rank, f"{next(lines[rank])}{rank % 2}\n") for rank in pieces)).splitlines()
        assert sum(2 if "ranks 0, 2" in line else 1 for line in printed) == 36
        assert [line[0] for line in printed if line.endswith("1")] == said[1]


def test_no_line_is_held_for_long():
    folding = Folding(3)
    folding.take(0, b"only here\n", 1.0)
    folding.take(1, b"loading 7%", 1.1)
    assert folding.due() == 1.0
    assert folding.ready(1.0 + 0.9 * HOLD_SECONDS) == b""
    assert folding.ready(1.0 + 1.1 * HOLD_SECONDS) == b"only here\n"
    assert folding.ready(1.1 + 1.1 * HOLD_SECONDS) == b"loading 7%"
    assert folding.due() is None
    folding.take(1, b"\rloaded\n", 2.0)  # the rest of a line whose beginning is printed
    assert folding.ready(2.0) == b"\rloaded\n"
    folding.take(0, b"".join(b"%d\n" % k for k in range(5000)), 3.0)
    assert folding.ready(3.0).endswith(b"\n3999\n")


@pytest.mark.parametrize(
    ("ranks", "expected"), [([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7], "0, 2-3, 7"), ([1, 2], "1-2")]
)
def test_ranks_are_spelled_in_short(ranks, expected):
    assert spelled(ranks) == expected


def test_the_copier_prints_all_until_the_last_rank_has_ended():
    """Ranks find their pipes by their number; one without a pipe writes to mpirun's."""
    read, write = os.pipe()
    before = os.dup(2)
    os.dup2(write, 2)
    try:
        with copier.error_output(3) as (errors, to_its_pipe):
            for rank in ("0", "1", "2", "9"):
                program = ["sh", "-c", "echo only $PMI_RANK >&2"]
                environment = {"PATH": os.environ["PATH"], "PMI_RANK": rank}
                subprocess.run([*to_its_pipe, *program], env=environment, stderr=errors, check=True)
    finally:
        os.dup2(before, 2)
        os.close(write)
    with open(read, encoding="utf-8") as printed:
        lines = printed.read().splitlines()
    assert sorted(lines) == ["only 0", "only 1", "only 2", "only 9"]
