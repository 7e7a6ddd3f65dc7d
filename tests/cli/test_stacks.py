"""`jdistgrad stacks`: which job is meant, and what is said of processes that do not answer."""

import os
import socket

import pytest

from jdistgrad.cli import stacks
from jdistgrad.cli.main import main
from jdistgrad.errors import LauncherError
from jdistgrad.rpc.flight import folder, processes

NEVER = 1 << 30  # no process has this id


def announce(root, job, label="rank0", pid=None, rank=0, **more):
    (root / job).mkdir(exist_ok=True)
    one = {"label": label, "rank": rank, "host": socket.gethostname(), "command": ["train.py"], **more}
    here = os.getpid() if pid is None else pid
    folder.write(root / job / f"{label}.process.json", {**one, "pid": here, "start": processes.start_of(here)})


def test_the_only_running_job_is_meant(tmp_path):
    announce(tmp_path, "ended", pid=NEVER)
    announce(tmp_path, "running")
    assert stacks.choose(None, stacks.jobs(tmp_path)).folder == tmp_path / "running"


def test_several_are_listed(tmp_path, capsys):
    announce(tmp_path, "first")
    announce(tmp_path, "second", rank=None)
    assert stacks.choose(None, stacks.jobs(tmp_path)) is None
    head, first, second = capsys.readouterr().out.splitlines()
    assert "name one" in head
    assert first.split()[:3] == [str(os.getppid()), "1", "processes"]
    assert second.split()[0] == str(os.getpid())
    assert second.endswith("s  train.py")


def test_a_job_is_found_by_any_process_above_its_ranks(tmp_path):
    announce(tmp_path, "ended", pid=NEVER)
    announce(tmp_path, "running")
    known = stacks.jobs(tmp_path)
    for pid in (os.getpid(), os.getppid()):
        assert stacks.choose(str(pid), known).folder == tmp_path / "running"
    assert stacks.choose(str(tmp_path / "ended"), known).folder == tmp_path / "ended"


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (None, "no job that is running here records what it does. Start it with JDISTGRAD_DEBUG=1"),
        (str(NEVER), f"process {NEVER} has no ranks here that record what they do. Start it with JDISTGRAD_DEBUG=1"),
        ("train.py", "'train.py' is neither the process id of a job"),
        ("{tmp_path}", "is not the folder of a job"),
    ],
)
def test_otherwise_an_error_says_what_to_do(job, said, tmp_path):
    with pytest.raises(LauncherError, match=said):
        stacks.choose(job and job.format(tmp_path=tmp_path), [])


def test_processes_that_say_nothing_are_named(tmp_path, capsys):
    announce(tmp_path, "job", "rank0", pid=NEVER)
    announce(tmp_path, "job", "rank1", host="another", rank=1)
    (tmp_path / "job" / "rank0.stacks.txt").write_text("Thread 0x1\n")
    assert main(["stacks", str(tmp_path / "job")]) == 0
    text = capsys.readouterr().out
    assert "0 of 2 processes" in text
    assert f"rank0, process {NEVER} on {socket.gethostname()}: it has ended" in text
    assert "  Thread 0x1" in text
    assert "on another: on another machine. Run this there" in text
