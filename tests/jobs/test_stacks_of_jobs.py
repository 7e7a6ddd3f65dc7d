"""What ranks that wait for ever, or stand still, show to `jdistgrad stacks`, and what they leave."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import pytest

from jdistgrad.cli import launch

CYCLE = """
    import pathlib, threading
    import jdistgrad as jd

    finished = threading.Event()


    def result_of_step():
        pathlib.Path(f"served{jd.rank()}").touch()
        finished.wait()


    me = jd.init()
    with jd.context():
        answer = jd.rpc_async((me.rank + 1) % jd.world_size(), result_of_step)
        while not pathlib.Path("end").exists():
            finished.wait(0.05)  # here every rank waits
        finished.set()
        answer.result()
    jd.shutdown()
"""

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

    def start(source):
        (tmp_path / "program.py").write_text(textwrap.dedent(source))
        command = launch.command(3, ["program.py"])
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
        job.wait()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the job did not come so far"
        time.sleep(0.05)


def stacks(tmp_path, *arguments):
    environment = {**os.environ, "JDISTGRAD_DEBUG_DIR": str(tmp_path / "debug")}
    command = [sys.executable, "-m", "jdistgrad", "stacks", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cycle_of_calls_is_named_with_the_users_lines(running_job, tmp_path):
    job = running_job(CYCLE)
    until(lambda: all((tmp_path / f"served{rank}").exists() for rank in range(3)))
    text = stacks(tmp_path, job.pid, "--events", "3")
    assert "cycle: worker0 -> worker1 -> worker2 -> worker0 (for " in text, text
    assert text.count("at program.py:17, in <module>") == 3
    assert text.count("at program.py:10, in result_of_step") == 3
    assert "worker1 -> worker2: __main__.result_of_step (call 1:0, context 1:0), " in text
    (tmp_path / "end").touch()
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert list((tmp_path / "debug").iterdir()) == []


def test_a_rank_that_stands_still_in_c_shows_its_place(running_job, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    job = running_job(STANDS_STILL)
    until(lambda: (tmp_path / "served2").exists())

    _, _, command = (tmp_path / "told").read_text().partition("who waited for whom: jdistgrad stacks ")
    folder, _, file = command.partition(" (this process wrote ")
    written = json.loads((pathlib.Path(folder) / file.removesuffix(")")).read_text())
    assert "wait_for_ever on worker0" in written["cause"]

    text = stacks(tmp_path)
    assert "2 of 3 processes" in text
    assert "a thread at program.py:14, in stand_still" in text
    assert "worker0 -> worker2: __main__.stand_still" in text
    (tmp_path / "pipe").write_bytes(b"")  # ends the wait of rank 2
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert output == "my own handler\n"  # of the rank that was sent the signal, and of no other
    assert "rank1, process " in stacks(tmp_path, folder)  # the job has ended: its files say why
