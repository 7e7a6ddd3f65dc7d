"""The flight recorder: what it keeps, what it writes, and where."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading

import jax.numpy as jnp
import pytest

import jdistgrad as jd
from jdistgrad import events
from jdistgrad.events import Event
from jdistgrad.observe import waits
from jdistgrad.observe.wait_report import render
from jdistgrad.rpc.flight import folder, processes
from jdistgrad.rpc.flight.recorder import EVENTS, Recorder
from jdistgrad.rpc.worker import current_worker

finished, entered = threading.Event(), threading.Semaphore(0)


def result_of_step():
    entered.release()
    finished.wait()
    return 1


@pytest.fixture
def recorder(tmp_path):
    """Return a recorder that is told of events, and writes its files when it is asked to."""
    one = Recorder(tmp_path / "job", "process")
    folder.make(one.folder)
    events.listen(one.record)
    yield one
    events.stop_listening(one.record)


def test_a_cycle_of_three_waiting_calls_is_named(recorder):
    finished.clear()
    written = threading.Event()

    def main():
        me = jd.init()
        recorder.add(current_worker())
        jd.barrier()
        with jd.context() as ctx:
            future = jd.rpc_async((me.rank + 1) % 3, result_of_step)
            if me.rank == 0:
                for _ in range(3):
                    entered.acquire()
                recorder.write("a test")
                written.set()
            written.wait()
            finished.set()
            assert future.result() == 1
            context = ctx.id
        jd.shutdown()
        return context

    jd.spawn(main, 3)
    (snapshot,) = folder.read(recorder.folder, folder.WAITS).values()
    found = waits.merge([snapshot])
    assert [[found.names[node] for node in cycle] for cycle in waits.cycles(found.edges)] == [
        ["worker0", "worker1", "worker2"]
    ]
    text = render("a job", [snapshot], [])
    assert "cycle: worker0 -> worker1 -> worker2 -> worker0" in text
    assert "in result_of_step" in text
    for facts in snapshot["workers"]:
        rank = facts["rank"]
        (served,), (made,) = facts["serving"], facts["calls"]
        assert (made["to"], served["caller"]) == ((rank + 1) % 3, (rank - 1) % 3)
        assert made["context"].startswith(f"{rank}:")
        assert served["context"].startswith(f"{(rank - 1) % 3}:")


def ask_next(rank):
    return jd.rpc_sync(rank, result_of_step)


def test_a_call_names_the_call_that_is_being_served_where_it_was_made(recorder):
    finished.clear()
    with jd.local_workers(3) as world:
        for worker in world._worker.transport.world._present().values():
            recorder.add(worker)
        future = jd.rpc_async("worker1", ask_next, args=(2,))
        entered.acquire()
        _, asking, _ = recorder.snapshot("a test")["workers"]
        finished.set()
        assert future.result() == 1
    (made,), (served,) = asking["calls"], asking["serving"]
    assert made["serving"] == served["id"]
    assert served["id"].startswith("0:")


def test_an_error_that_ends_a_wait_names_the_command_and_the_file_has_the_call(recorder):
    finished.clear()
    with jd.local_workers(3) as world:
        recorder.add(world._worker)
        with pytest.raises(jd.CallTimeoutError, match=r"\nwho waited for whom: jdistgrad stacks .*process.waits.json"):
            jd.rpc_sync("worker2", result_of_step, timeout=0.2)
        entered.acquire()
        finished.set()
    snapshot = json.loads((recorder.folder / "process.waits.json").read_text())
    assert [one["to"] for one in snapshot["workers"][0]["calls"]] == [2]
    assert "result_of_step on worker2" in snapshot["cause"]


def test_the_last_events_are_kept_beside_a_timeline_and_no_arrays(recorder):
    with jd.local_workers(3), jd.timeline() as recorded:
        for k in range(EVENTS):
            jd.rpc_sync("worker1", abs, args=(-k,))
        array = jnp.ones(3)
        events.pass_on(Event(events.PIECE, 0, "worker0", "piece 7", 1.0, 2.0, {}, [array]))
    assert len(recorded.events) == 2 * EVENTS + 1
    kept = recorder.snapshot("a test")["events"]
    assert len(kept) == EVENTS
    assert any(one["name"] == "piece 7" for one in kept)
    assert all(told.arrays is None for told in recorder._events if isinstance(told, Event))
    assert {one["name"] for one in kept} == {"piece 7", "builtins.abs"}


def test_a_reader_sees_whole_files_only(tmp_path):
    path = tmp_path / "rank1.waits.json"
    folder.write(path, {"a": 1})
    folder.write(path, {"b": [2]})
    (tmp_path / "rank0.waits.json").write_text('{"cut o')
    assert folder.read(tmp_path, folder.WAITS) == {"rank1": {"b": [2]}}
    assert [one.name for one in sorted(tmp_path.iterdir())] == ["rank0.waits.json", "rank1.waits.json"]


def test_old_folders_go_unless_their_process_still_runs_or_is_not_known_here(tmp_path):
    here = {"rank": 0, "pid": os.getpid(), "start": processes.start_of(os.getpid()), "command": ["train.py"]}
    here["host"] = socket.gethostname()
    jobs = {"over": {**here, "start": 1}, "running": here, "elsewhere": {**here, "start": 1, "host": "another"}}
    for name, process in {"broken": {"pid": 1}, "no process": 7, **jobs}.items():
        (tmp_path / name).mkdir()
        folder.write(tmp_path / name / "process.process.json", process)
    written = (tmp_path / "over").stat().st_mtime
    folder.remove_old(tmp_path, written + 0.9 * folder.KEPT_SECONDS)
    assert len(list(tmp_path.iterdir())) == 5
    folder.remove_old(tmp_path, written + 1.1 * folder.KEPT_SECONDS)
    assert {one.name for one in tmp_path.iterdir()} == {"running", "elsewhere"}


def test_a_rank_that_starts_removes_its_own_files_only(tmp_path):
    """Another rank may have made the folder, and be about to open a file in it."""
    folder.make(tmp_path / "job")
    (tmp_path / "job" / "rank1.process.json").write_text("of an earlier process")
    folder.unlink(tmp_path / "job", "rank1")
    assert (tmp_path / "job").is_dir()
    (tmp_path / "job" / "rank0.stacks.txt").write_text("of an earlier process")
    (tmp_path / "job" / "rank10.waits.json").touch()
    with folder.entered(tmp_path / "job", "rank0") as stacks:
        assert stacks.tell() == 0
    assert {one.name for one in (tmp_path / "job").iterdir()} == {"rank0.stacks.txt", "rank10.waits.json"}


def test_a_rank_starts_although_another_that_ends_removes_the_folder_meanwhile(tmp_path, monkeypatch):
    others = [tmp_path / "job"] * 3

    def unlink(job, label):
        if others:
            others.pop().rmdir()

    monkeypatch.setattr(folder, "unlink", unlink)
    folder.entered(tmp_path / "job", "rank0").close()
    assert not others
    assert (tmp_path / "job" / "rank0.stacks.txt").exists()


def test_a_rank_ends_although_another_that_ends_removes_the_folder_meanwhile(tmp_path, monkeypatch):
    folder.make(tmp_path / "job")
    genuine = os.scandir

    def scandir(path):
        (tmp_path / "job").rmdir()
        monkeypatch.undo()
        return genuine(path)

    monkeypatch.setattr(os, "scandir", scandir)
    folder.remove(tmp_path / "job", "rank0")
    assert os.scandir is genuine
    assert not (tmp_path / "job").exists()


def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "settings", dataclasses.replace(folder.settings, debug_dir=""))
    folder.make(tmp_path / "jdistgrad-debug-5" / "job")
    owner = os.lstat(tmp_path).st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="jdistgrad-debug-5 belongs to another user"):
        folder.make(tmp_path / "jdistgrad-debug-5" / "job")


PROGRAM = """
import json, os, pathlib, signal, time
import jdistgrad as jd
jd.init()
(folder,) = pathlib.Path(os.environ["JDISTGRAD_DEBUG_DIR"]).iterdir()
assert not json.loads((folder / "process.process.json").read_text())["own_handler"]
os.kill(os.getpid(), signal.SIGUSR1)  # which would end another process
assert 'File "<string>"' in (folder / "process.stacks.txt").read_text()
signal.signal(signal.SIGUSR1, print)
while not json.loads((folder / "process.process.json").read_text())["own_handler"]:
    time.sleep(0.02)
jd.shutdown()
"""


def test_a_program_that_ends_well_leaves_nothing_and_survives_the_signal(tmp_path):
    environment = {**os.environ, "JDISTGRAD_DEBUG": "1", "JDISTGRAD_DEBUG_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []


HANDLED_BEFORE = """
import os, pathlib, signal
import jdistgrad as jd
came = []
signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
jd.init()
jd.rpc_sync(0, len, args=("",))  # puts signals off, by handlers around those that are there
(folder,) = pathlib.Path(os.environ["JDISTGRAD_DEBUG_DIR"]).iterdir()
os.kill(os.getpid(), signal.SIGUSR1)
assert came == [signal.SIGUSR1]
assert 'File "<string>"' in (folder / "process.stacks.txt").read_text()
jd.shutdown()
"""


def test_the_signal_writes_stacks_and_calls_the_handler_that_was_there_before(tmp_path):
    environment = {**os.environ, "JDISTGRAD_DEBUG": "1", "JDISTGRAD_DEBUG_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", HANDLED_BEFORE], env=environment, check=True)


def test_a_folder_that_cannot_be_written_is_an_error_of_init(tmp_path):
    (tmp_path / "file").touch()
    environment = {**os.environ, "JDISTGRAD_DEBUG": "1", "JDISTGRAD_DEBUG_DIR": str(tmp_path / "file")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert "cannot be written" in done.stderr
    assert "JDISTGRAD_DEBUG_DIR" in done.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PMIX_NAMESPACE": "prterun-node-5@1", "SLURM_JOB_ID": "3"}, "prterun-node-5@1"),
        ({"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0"}, "3-0"),
        ({"SLURM_JOB_ID": "3"}, "launcher-9"),
        ({"PMI_JOBID": "../kvs 1"}, ".._kvs_1"),
        ({}, "launcher-9"),
    ],
)
def test_ranks_of_a_job_agree_on_its_folder(environment, expected):
    assert folder.job_name(environment, 9) == expected


def test_a_process_is_known_by_its_id_and_its_start():
    me, start = os.getpid(), processes.start_of(os.getpid())
    assert processes.is_running(me, start)
    assert not processes.is_running(me, start - 1)  # another one had this id before
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        began = processes.start_of(child.pid)
        assert processes.is_running(child.pid, began)
        assert processes.descends_from(child.pid, me)
        assert not processes.descends_from(me, child.pid)
        child.kill()
        child.wait()
        assert not processes.is_running(child.pid, began)


def test_settings_are_checked():
    command = [sys.executable, "-c", "import jdistgrad.config"]
    done = subprocess.run(
        command, env={**os.environ, "JDISTGRAD_DEBUG": "yes"}, capture_output=True, text=True, check=False
    )
    assert "the environment variable JDISTGRAD_DEBUG must be 0 or 1, not 'yes'" in done.stderr
