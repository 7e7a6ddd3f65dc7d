"""Processes forked from a worker: they have no world, get errors that say so, and end without harm to others."""

import os
import subprocess
import sys

USES = """
import concurrent.futures, operator, os, sys, warnings
import jax.numpy as jnp
import jdistgrad as jd
warnings.simplefilter("ignore")  # JAX warns when a process forks

def refused(what, use):
    try:
        use()
    except Exception as error:
        assert "was forked from that of worker" in str(error), (what, error)
    else:
        raise AssertionError(f"{what} went through")

def use_everything(future, rref):
    refused("rpc_sync", lambda: jd.rpc_sync(1, operator.add, args=(1, 2)))
    refused("rpc_async", lambda: jd.rpc_async(0, operator.add, args=(1, 2)))
    refused("remote", lambda: jd.remote(2, operator.add, args=(1, 2)))
    refused("RRef", lambda: jd.RRef(1))
    refused("worker_info", jd.worker_info)
    refused("context", lambda: jd.context().__enter__())
    refused("to_here", rref.to_here)
    refused("creation", rref.creation)
    refused("future", future.result)
    refused("shutdown", jd.shutdown)
    refused("init", jd.init)
    refused("local_workers", lambda: jd.local_workers(2))

def child(work):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    work()
    sys.exit(0)

def stop():
    sys.exit(5)

def fail():
    1 / 0

def give_up():
    sys.exit("gave up")  # Python prints what is no number, and exits with status 1

def fail_silently():
    sys.stderr.close()
    1 / 0

def program(wait):
    rref = jd.remote(2, jnp.ones, args=(3,))
    future, called_back = jd.rpc_async(1, wait, args=(2,)), concurrent.futures.Future()
    future.add_done_callback(lambda answer: called_back.set_result(child(fail)))
    with jd.context():
        jd.rpc_sync(1, operator.neg, args=(1.0,))
        print("used:", child(lambda: use_everything(future, rref)), flush=True)
    print("exited:", child(lambda: sys.exit(5)), flush=True)
    print("raised:", child(lambda: 1 / 0), flush=True)
    print("called:", [jd.rpc_sync(rank, child, args=(end,), timeout=20) for rank in (0, 1) for end in (stop, fail)])
    print("gave up:", jd.rpc_sync(1, child, args=(give_up,), timeout=20))
    print("failed silently:", jd.rpc_sync(1, child, args=(fail_silently,), timeout=20))
    assert future.result() is None
    print("called back:", called_back.result(20))  # what a callback raises is only logged
    assert rref.to_here().sum() == 3
    del rref
    assert jd.rpc_sync(1, operator.add, args=(1, 2)) == 3
"""

UNDER_MPI = """
import time
me = jd.init()
if me.rank == 0:
    program(time.sleep)
jd.shutdown()
print("done", flush=True)
"""

AS_THREADS = """
import time
with jd.local_workers(3):
    program(time.sleep)
print("done", flush=True)
"""


def check(output):
    for line in ("used: 0", "exited: 5", "raised: 1", "ZeroDivisionError", "called: [5, 1, 5, 1]", "called back: 0"):
        assert line in output, output
    assert output.splitlines().count("gave up") == 1
    assert "gave up: 1" in output
    assert "failed silently: 1" in output
    assert "ending the job" not in output


def test_children_of_a_rank(mpi_job):
    job = mpi_job(3, USES + UNDER_MPI).expect("done")
    check(job.output)
    assert job.output.splitlines().count("done") == 3


def test_children_of_a_rank_that_is_alone(mpi_job):
    job = mpi_job(1, "import os, sys\nimport jdistgrad as jd\njd.init()\n" + ALONE).expect(
        "exited: 7", "raised: 1", "done"
    )
    assert "ending the job" not in job.output


ALONE = """
for how in ("exited", "raised"):
    pid = os.fork()
    if not pid:
        sys.exit(7) if how == "exited" else 1 / 0
    print(f"{how}: {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)
jd.shutdown()
print("done", flush=True)
"""


def test_children_of_a_process_with_a_local_world(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(USES + AS_THREADS)
    ended = subprocess.run(
        [sys.executable, str(script)], env=os.environ, timeout=60, text=True, capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    check(ended.stdout + ended.stderr)
    assert "done" in ended.stdout


AFTER_COMPUTATIONS = """
with jd.local_workers(3):
    jnp.ones((300, 300)).dot(jnp.ones((300, 300))).block_until_ready()
    print("ended:", [child(lambda: None) for _ in range(10)])
"""


def test_children_end_though_jax_has_used_its_threads(tmp_path):
    """JAX joins its threads at the end of Python; in a child, which has none of them, that crashes."""
    script = tmp_path / "program.py"
    script.write_text(USES + AFTER_COMPUTATIONS)
    ended = subprocess.run([sys.executable, str(script)], timeout=60, text=True, capture_output=True, check=False)
    assert f"ended: {[0] * 10}" in ended.stdout, ended.stdout + ended.stderr


MULTIPROCESSING = """
import multiprocessing, operator
import jdistgrad as jd

def call():
    return jd.rpc_sync(1, operator.add, args=(1, 2))

def init():
    me = jd.init()
    jd.shutdown()
    return me

def own_world():
    with jd.local_workers(2):
        return call()

def collectives():
    return jd.collectives.MPI(timeout=20).size

def tried(use, queue):
    try:
        queue.put(use())
    except Exception as error:
        queue.put(str(error))

if __name__ == "__main__":
    OPEN_A_WORLD
    if me.rank == 0:
        for method in ("fork", "spawn"):
            processes = multiprocessing.get_context(method)
            for use in (call, init, own_world, collectives):
                queue = processes.Queue()
                process = processes.Process(target=tried, args=(use, queue))
                process.start()
                print(f"{method} {use.__name__}: {queue.get(timeout=30)}", flush=True)
                process.join()
                assert process.exitcode == 0
        assert call() == 3
    jd.shutdown()
    print("done", flush=True)
"""
FORKED = ("fork call: this process was forked", "fork init: init: this", "fork own_world: local_workers: this")
SPAWNED = ("spawn call: there is no world here", "spawn own_world: 3")


def test_processes_of_multiprocessing_under_mpi(mpi_job):
    """A process that is spawned inherits the rank's environment, by which it would wait for its own place in MPI."""
    job = mpi_job(3, MULTIPROCESSING.replace("OPEN_A_WORLD", "me = jd.init()"))
    started = "this process was started by process"
    job.expect(
        "done", *FORKED, *SPAWNED, f"spawn init: init: {started}", f"spawn collectives: collectives.MPI: {started}"
    )


def test_a_process_that_a_rank_has_started_lets_its_debug_files_be(mpi_job, tmp_path):
    """They are called after the rank, whose environment the process has."""
    mpi_job(
        2,
        f"""
        import pathlib, subprocess, sys
        import jdistgrad as jd

        me = jd.init()
        files = sorted(pathlib.Path({str(tmp_path)!r}).rglob("rank*"))
        if me.rank == 0:
            for use in ("jd.init()", "jd.local_workers(2).close()"):
                subprocess.run([sys.executable, "-c", "import jdistgrad as jd; " + use], stderr=subprocess.DEVNULL)
            assert len(files) >= 2, files
            assert sorted(pathlib.Path({str(tmp_path)!r}).rglob("rank*")) == files
        jd.shutdown()
        print("done")
        """,
        JDISTGRAD_DEBUG="1",
        JDISTGRAD_DEBUG_DIR=str(tmp_path),
    ).expect("done")


def test_processes_of_multiprocessing_beside_a_local_world(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(MULTIPROCESSING.replace("OPEN_A_WORLD", "jd.local_workers(3); me = jd.worker_info()"))
    ended = subprocess.run([sys.executable, str(script)], timeout=60, text=True, capture_output=True, check=False)
    for line in ("done", *FORKED, *SPAWNED, "spawn init: worker0 (rank 0)", "spawn collectives: 1"):
        assert line in ended.stdout, ended.stdout + ended.stderr


INTERRUPTED = """
import os, signal, threading, time
from jdistgrad.wire.interrupts import put_off_interrupt

def fork():
    pid = os.fork()
    if pid:
        threads.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
    except KeyboardInterrupt:
        os._exit(0)
    os._exit(1)

threads = []
signal.signal(signal.SIGINT, signal.default_int_handler)
with put_off_interrupt():
    other = threading.Thread(target=fork)
    other.start()
    other.join()
print("child:", threads, flush=True)
"""


def test_a_child_of_another_thread_can_be_interrupted():
    """The parent's main thread, which put off interrupts, does not exist in the child."""
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], timeout=60, text=True, stdout=subprocess.PIPE, check=False
    )
    assert ended.stdout == "child: [0]\n"


def test_collectives_are_refused_in_a_forked_process(mpi_job):
    mpi_job(
        3,
        USES
        + """
me = jd.init()
dp = jd.DataParallel(timeout=5)
tree = {"w": jnp.full(3, 1.0 + me.rank)}
dp.average(tree)
if me.rank == 1:
    def work():
        refused("allreduce", lambda: dp.collectives.allreduce(tree["w"]))
        refused("broadcast_in_place", lambda: dp.collectives.broadcast_in_place(__import__("numpy").ones(3), 0))
    print("used:", child(work), flush=True)
assert (dp.average(tree)["w"] == 2).all()
jd.shutdown()
""",
    ).expect("used: 0")
