"""Equal lines of several ranks, folded into one."""

import concurrent.futures
import contextlib
import os
import random
import re
import shutil
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


LABEL = re.compile(r"\[ranks ([^]]*)\] (.*\n)")


def in_order(printed, said):
    """Return whether what was printed is all that each rank said, in its order: text without ranks is anybody's."""
    states, position = {(0,) * len(said)}, 0  # how much of each rank's text may have been printed
    while position < len(printed):
        label = LABEL.match(printed, position)
        ranks, text = (members(label[1]), label[2]) if label else ([], printed[position])
        choices = [ranks] if label else [[rank] for rank in range(len(said))]
        states = {after for state in states for ranks in choices for after in [advanced(state, ranks, text, said)]}
        states.discard(None)
        position = label.end() if label else position + 1
    return tuple(map(len, said)) in states


def advanced(state, ranks, text, said):
    if not all(said[rank].startswith(text, state[rank]) for rank in ranks):
        return None
    return tuple(done + len(text) * (rank in ranks) for rank, done in enumerate(state))


def members(spelt):
    bounds = [(part.split("-")[0], part.split("-")[-1]) for part in spelt.split(", ")]
    return [rank for first, last in bounds for rank in range(int(first), int(last) + 1)]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_of_a_rank_is_lost_or_put_out_of_order(seed):
    """Lines come in pieces, and some so late that the beginning of a line or its equals have been printed."""
    draw = random.Random(seed)
    said = ["".join(draw.choice(["a\n", "b\n", "cd\n"]) for _ in range(12)) for _ in range(3)]
    folding, now, printed, left = Folding(3), 0.0, b"", list(said)
    while any(left):
        rank = draw.choice([rank for rank in range(3) if left[rank]])
        length = draw.randint(1, 8)
        folding.take(rank, left[rank][:length].encode(), now)
        left[rank] = left[rank][length:]
        now += draw.choice([0.0, 0.01, 0.3 * HOLD_SECONDS, 1.1 * HOLD_SECONDS])
        printed += folding.ready(now)
    assert in_order((printed + folding.end()).decode(), said)


def test_text_after_a_beginning_that_was_printed_is_not_moved_before_it():
    folding = Folding(2)
    folding.take(1, b"Loading... ", 0.0)
    printed = folding.ready(1.1 * HOLD_SECONDS)
    folding.take(0, b"X\n", 0.3)
    folding.take(1, b"done\nX\n", 0.31)
    assert printed + folding.end() == b"Loading... X\ndone\nX\n"


def test_ranks_that_print_much_together_are_not_folded_for_long():
    folding, printed = Folding(3), b""
    for k in range(5000):
        for rank in range(3):
            folding.take(rank, b"%d\n" % k, 1.0)
            printed += folding.ready(1.0)
    assert printed.startswith(b"[ranks 0-2] 0\n[ranks 0-2] 1\n")
    assert printed.endswith(b"\n4999\n4999\n4999\n")


def test_a_rank_that_prints_much_is_not_kept_waiting():
    """What is held of it does not grow, and no line of it costs a search through the others."""
    folding = Folding(8)
    much = b"".join(b"%019d\n" % k for k in range(100_000))
    for rank in range(8):
        folding.take(rank, much, 1.0)
        assert folding.ready(1.0).count(b"\n") == 100_000
        assert folding.due() is None
    folding.take(3, b"x" * 100_000, 1.0)
    assert len(folding.ready(1.0)) == 100_000
    later = 1.0 + 1.1 * HOLD_SECONDS
    folding.take(3, b"\n", later)
    for rank in range(8):
        folding.take(rank, b"an end\n", later)
    assert folding.ready(later) == b"\n[ranks 0-7] an end\n"


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


@pytest.mark.parametrize(
    ("ranks", "expected"), [([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7], "0, 2-3, 7"), ([1, 2], "1-2")]
)
def test_ranks_are_spelled_in_short(ranks, expected):
    assert spelled(ranks) == expected


@contextlib.contextmanager
def stderr_to(descriptor):
    """Let this process's stderr be another descriptor, which is closed at the end."""
    before = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(descriptor)


def read_all(descriptor):
    with open(descriptor, encoding="utf-8") as printed:
        return printed.read()


def run_as(rank, to_its_pipe, script, errors):
    """Run a shell script as a rank does."""
    environment = {"PATH": os.environ["PATH"], "PMI_RANK": str(rank)}
    subprocess.run([*to_its_pipe, "sh", "-c", script], env=environment, stderr=errors, check=True, timeout=20)


@pytest.mark.parametrize("failing", [False, True])
def test_all_is_printed_until_the_last_rank_has_ended(failing, monkeypatch):
    """Ranks find their pipes by their number; one without a pipe writes to mpirun's. The copier may fail to start."""
    if failing:
        monkeypatch.setattr(copier.sys, "executable", shutil.which("false"))
    read, write = os.pipe()
    with stderr_to(write), copier.error_output(3) as (errors, to_its_pipe):
        for rank in (0, 1, 2, 9):
            run_as(rank, to_its_pipe, "echo only $PMI_RANK >&2", errors)
    assert sorted(read_all(read).splitlines()) == ["only 0", "only 1", "only 2", "only 9"]


def test_ranks_go_on_when_nobody_reads_what_is_printed():
    read, write = os.pipe()
    os.close(read)
    with stderr_to(write), copier.error_output(3) as (errors, to_its_pipe):
        for rank in (0, 1, 2, 9):
            run_as(rank, to_its_pipe, "set -e; head -c 200000 /dev/zero >&2; head -c 200000 /dev/zero >&2", errors)


def test_a_terminal_that_does_not_block_gets_all():
    read, write = os.pipe()
    os.set_blocking(write, False)
    with concurrent.futures.ThreadPoolExecutor(1) as reading:
        with stderr_to(write), copier.error_output(3) as (errors, to_its_pipe):
            run_as(1, to_its_pipe, "yes | head -c 100000 >&2", errors)  # more than a pipe holds
            printed = reading.submit(read_all, read)
        assert printed.result() == "y\n" * 50_000


def test_a_job_of_many_ranks_takes_few_descriptors():
    with copier.error_output(copier.MOST_PIPES) as (_, to_its_pipe):
        assert to_its_pipe
    with copier.error_output(512) as (_, to_its_pipe):
        assert to_its_pipe == []
