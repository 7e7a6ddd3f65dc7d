"""The driver: a few programs in processes of their own, in which XLA has two threads, one for each of two cores."""

import signal
import subprocess
import sys
import time

import pytest

from torture import watching
from torture.__main__ import main
from torture.programs import FEATURES
from torture.watching import World

CASES = {
    "collectives inside jit need a thread of XLA's for each worker": ("local-3", ["19"], []),
    "compiled steps in another order": ("mpi-3", ["24"], []),
    "a compiled step that one rank leaves out": ("mpi-2", ["9"], []),
    "jitted functions that call each other, with large arrays": ("mpi-2", ["103"], []),
    "jitted functions that call each other, on two devices": (
        "local-2",
        ["42", "90", "110"],
        ["jitted", "nested", "remote"],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("where", "seeds", "features"), CASES.values(), ids=CASES)
def test_programs_are_right(where, seeds, features, capsys):
    # The keys of ``CASES`` name the fault that each case has found.
    chosen = ["--features", *(features or FEATURES.keys() - {"owners"})]  # which came after these programs
    status = main(["--worlds", where, "--seeds", *seeds, "--limit", "30", *chosen])
    printed = capsys.readouterr().out
    assert f"{where}: {len(seeds)} programs, 0 mismatches, 0 crashes, 0 hangs" in printed, printed
    assert status == 0


def test_a_fault_is_counted_and_changes_the_exit_status(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "nowhere")
    assert main(["--worlds", "local-2", "--seeds", "3"]) == 1
    printed = capsys.readouterr().out
    assert "crash: PYTHONPATH=tests .venv/bin/python -m torture --worlds local-2 --seeds 3\n" in printed
    assert "local-2: 1 programs, 0 mismatches, 1 crashes, 0 hangs" in printed


def test_a_batch_that_stands_still_is_ended_with_its_stacks(tmp_path):
    # The batch's last note is old; the handler of the signal writes its stacks.
    code = (
        "import pathlib, sys, time; from torture.batch import Notes\n"
        "def waiting_for_nothing(): time.sleep(600)\n"
        "notes = Notes(pathlib.Path(sys.argv[1]), 0); notes.write(begins=7); waiting_for_nothing()"
    )
    environment = World("local-2").environment()
    job = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment, start_new_session=True)
    try:
        while not (tmp_path / "notes-0").exists() or "begins" not in (tmp_path / "notes-0").read_text():
            assert job.poll() is None
            time.sleep(0.05)
        assert watching.watch(job, tmp_path, limit=0.2) is None
        watching.ask_for_stacks(tmp_path)
    finally:
        watching.end(job)
    assert job.poll() == -signal.SIGTERM
    assert "in waiting_for_nothing" in (tmp_path / "stacks-0").read_text()
