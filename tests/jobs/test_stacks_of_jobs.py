"""What ranks that wait for ever, or stand still, show to `jdistgrad stacks`, and what they leave."""

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import time

import pytest

from jdistgrad.cli import launch

DOCS = pathlib.Path(__file__).parents[2] / "docs"

STANDS_STILL = """
    import ctypes, os, pathlib, signal, threading
    import jdistgrad as jd

    never = threading.Event()


    def wait_for_ever():
        never.wait()


    def stand_still():
        pathlib.Path("served2").touch()
        return ctypes.PyDLL(None).open(b"pipe", os.O_RDONLY)  # in C, with Python's lock


    signal.signal(signal.SIGUSR1, lambda *_: print("my own handler", flush=True))
    me = jd.init()
    if me.rank == 1:
        try:
            jd.rpc_sync(0, wait_for_ever, timeout=0.3)
        except jd.CallTimeoutError as error:
            pathlib.Path("told").write_text(str(error))
    if me.rank == 0:
        while not pathlib.Path("told").exists():
            never.wait(0.05)
        assert jd.rpc_sync(2, stand_still) > 0
        never.set()
    jd.shutdown()
"""


@pytest.fixture
def running_job(tmp_path):
    """Return a function that starts a program on three ranks that record what they do, in a folder of its own."""
    jobs = []

    def start(source, name="program.py"):
        (tmp_path / name).write_text(textwrap.dedent(source))
        command = launch.command(3, [name])
        debugging = {"JDISTGRAD_DEBUG": "1", "JDISTGRAD_DEBUG_DIR": str(tmp_path / "debug"), "OMPI_MCA_btl": "^ofi"}
        jobs.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**os.environ, **debugging},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return jobs[-1]

    yield start
    for job in jobs:
        job.terminate()
        job.communicate()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the job did not come so far"
        time.sleep(0.05)


def stacks(tmp_path, *arguments, status=0):
    environment = {**os.environ, "JDISTGRAD_DEBUG_DIR": str(tmp_path / "debug")}
    command = [sys.executable, "-m", "jdistgrad", "stacks", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert status is None or done.returncode == status, done.stderr
    return done.stdout


def without_numbers(report):
    """Return a report without its folder, ids of processes, host and times, and without indentation."""
    text = re.sub(r"\d+\.\d s", "T s", re.sub(r"process \d+ on \S+,", "process P on HOST,", report))
    return "\n".join(line.strip() for line in text.splitlines())


def test_the_report_of_a_cycle_of_calls_is_that_of_the_page(running_job, tmp_path):
    job = running_job((DOCS / "programs" / "waiting.py").read_text(), "waiting.py")
    page = without_numbers((DOCS / "how-to" / "waiting.md").read_text())
    shown = ""

    def every_rank_waits():
        nonlocal shown
        shown = stacks(tmp_path, job.pid, status=None)
        return shown.count("in result_of_step") == 3 and "cycle" in shown

    until(every_rank_waits)
    head, report = without_numbers(shown).split("\n", 1)
    assert head.endswith(": 3 of 3 processes say what they wait for")
    assert head.partition(": ")[2] in page
    assert report.strip() in page


def test_a_rank_that_stands_still_in_c_shows_its_place(running_job, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    job = running_job(STANDS_STILL)
    until(lambda: (tmp_path / "served2").exists())

    _, _, command = (tmp_path / "told").read_text().partition("who waited for whom: jdistgrad stacks ")
    folder, _, file = command.partition(" (this process wrote ")
    written = json.loads((pathlib.Path(folder) / file.removesuffix(")")).read_text())
    assert "wait_for_ever on worker0" in written["cause"]

    text = stacks(tmp_path, "--wait", 2)
    assert "its program handles SIGUSR1, so it was not sent the signal" in text
    text = stacks(tmp_path, "--signal")
    assert "2 of 3 processes" in text
    assert "a thread at program.py:14, in stand_still" in text
    assert "worker0 -> worker2: __main__.stand_still" in text
    (tmp_path / "pipe").write_bytes(b"")  # ends the wait of rank 2
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert output == "my own handler\n"  # of the rank that was sent the signal, and of no other
    assert "rank1, process " in stacks(tmp_path, folder)  # the job has ended: its files say why


def test_ranks_that_make_collectives_without_another_are_shown(running_job, tmp_path):
    source = """
        import threading
        import jdistgrad as jd

        me = jd.init()
        if me.rank == 1:
            threading.Event().wait()
        jd.DataParallel()
    """
    job = running_job(source)
    shown = ""

    def both_wait():
        nonlocal shown
        shown = stacks(tmp_path, job.pid, status=None)
        return shown.count("-> worker1") == 2

    until(both_wait)
    assert shown.count("-> worker1: new collectives") == 2, shown
