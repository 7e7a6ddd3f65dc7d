"""`jdistgrad stacks`: which job is meant, and what is said of processes that do not answer."""

import concurrent.futures
import os
import socket
import subprocess
import sys
import time

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
    assert main(["stacks", str(tmp_path / "job"), "--wait", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "0 of 2 processes" in text
    assert f"rank0, process {NEVER} on {socket.gethostname()}: it has ended" in text
    assert "  Thread 0x1" in text
    assert "on another: on another machine, it did not answer within 0.1 s" in text


def snapshot(label, **more):
    one = {"label": label, "rank": int(label[-1]), "pid": NEVER, "host": "node", "cause": "asked"}
    return {**one, "time": time.time(), "workers": [], "threads": [], "events": [], **more}


def test_processes_of_other_machines_are_waited_for_too(tmp_path):
    announce(tmp_path, "job", "rank0", host="first")
    announce(tmp_path, "job", "rank1", host="second", rank=1)
    (job,) = stacks.jobs(tmp_path)

    def answer():
        while not (job.folder / "asked").exists():
            time.sleep(0.01)
        folder.write(job.folder / "rank0.waits.json", snapshot("rank0"))
        time.sleep(0.3)
        folder.write(job.folder / "rank1.waits.json", snapshot("rank1"))

    with concurrent.futures.ThreadPoolExecutor(1) as others:
        others.submit(answer)
        answers = stacks.gathered(job, 30.0)
    assert [one["label"] for one in answers.fresh] == ["rank0", "rank1"]
    assert not answers.earlier + answers.silent


def test_what_an_ended_process_wrote_is_not_taken_for_what_it_does_now(tmp_path, capsys):
    announce(tmp_path, "job", "rank0", pid=NEVER)
    folder.write(tmp_path / "job" / "rank0.waits.json", snapshot("rank0", time=time.time() - 70))
    stacks.main(str(tmp_path / "job"), 0, 0.1)
    text = capsys.readouterr().out
    assert ": 0 of 1 processes say what they wait for; 1 said it earlier" in text
    assert "asked: it has ended; it wrote this 70 s ago" in text


WITH_HANDLER = """
import signal, sys
if sys.argv[1] == "handled":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit("saved"))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("kind", "options"), [("handled", []), ("unhandled", []), ("unhandled", ["--signal"])])
def test_a_diagnosis_does_not_end_a_process(kind, options, tmp_path, capsys):
    """The signal would end it: its handler saves and leaves, or it has none."""
    command = [sys.executable, "-S", "-c", WITH_HANDLER, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        announce(tmp_path, "job", pid=process.pid, own_handler=kind == "handled")
        assert main(["stacks", str(tmp_path / "job"), "--wait", "1.5", *options]) == 0
        process.communicate(timeout=20)
    assert process.returncode == 0
    text = capsys.readouterr().out
    assert "it did not answer within 1.5 s; Python does not run in it" in text
    assert ("its program handles SIGUSR1" in text) == (kind == "handled")


def test_a_folder_that_cannot_be_written_is_an_error_with_the_reason(tmp_path):
    announce(tmp_path, "job")
    (tmp_path / "job" / "asked").mkdir()
    with pytest.raises(LauncherError, match=r"cannot be asked: .*Is a directory"):
        stacks.main(str(tmp_path / "job"), 0, 0.1)
