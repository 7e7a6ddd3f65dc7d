"""`jdistgrad stacks`: it shows what each rank of a job waits for, also of one that runs no Python."""

import os
import subprocess
import sys

PROGRAM = """
import os, signal, subprocess, sys, threading, time
import jax.numpy as jnp
import jdistgrad as jd

def ask():
    time.sleep(1)
    shown = subprocess.run([sys.executable, "-m", "jdistgrad", "stacks"], capture_output=True, text=True)
    print(shown.stdout, shown.stderr, flush=True)
    os._exit(0)

me = jd.init()
if me.rank == 0:
    jd.rpc_sync(1, ask)
if me.rank == 1:
    time.sleep(60)
if me.rank == 3:
    from ctypes import PyDLL
    while True: PyDLL(None).sleep(50)  # holds Python's lock; the question wakes it
if me.rank == 2:
    jd.DataParallel().average(jnp.ones(3))
"""


def test_what_each_rank_waits_for(mpi_job, tmp_path):
    job = mpi_job(4, PROGRAM, JDISTGRAD_DEBUG="1", JDISTGRAD_DEBUG_DIR=str(tmp_path))
    job.expect(
        "worker0 (rank 0) at program.py:14, in <module>:",
        "waiting for worker1 (rank 1) to answer __main__.ask",
        status=None,
    )
    job.expect("serving __main__.ask for worker0 (rank 0)", "in new collectives, with worker0", status=None)
    job.expect("File ", "in ask", status=None)
    assert 'program.py", line 19' in job.output, job.output


def test_without_a_job_it_says_how_to_start_one(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-m", "jdistgrad", "stacks"],
        env={**os.environ, "JDISTGRAD_DEBUG_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Start it with JDISTGRAD_DEBUG=1" in shown.stderr
    assert shown.returncode == 2
