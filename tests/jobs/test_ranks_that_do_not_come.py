"""Ranks that are stopped, stuck or gone while others are in a collective: the job ends and names rank and place."""

import re

PROGRAM = """
import os, signal, sys, threading
import jax, jax.numpy as jnp
import jdistgrad as jd

me = jd.init()
dp = jd.DataParallel(timeout={timeout})
tree = {{"w": jnp.ones(1 << 23)}}
step = {wrap}(dp.average)
for number in range(10_000):
    if me.rank == 1 and number == 3:
        {act}
    jax.block_until_ready(step(tree))
    if me.rank == 0 and number == 2:
        print("begun", flush=True)
jd.shutdown()
"""

STOP = "threading.Timer(0.017, os.kill, [os.getpid(), signal.SIGSTOP]).start()"
SOON = {"JDISTGRAD_SILENCE": "4", "JDISTGRAD_HEARTBEAT": "0.5"}


def test_a_rank_that_is_stopped_while_all_average(mpi_job):
    # The rank stops before, in or after a reduction. The others wait for it no longer than the allowed silence.
    job = mpi_job(3, PROGRAM.format(timeout=300, wrap="jax.jit", act=STOP), **SOON)
    job.expect("begun", "worker1 (rank 1) is lost: it gave no sign of life for 4 s", status=None)


def test_a_rank_that_is_stuck_elsewhere_is_named_with_its_place(mpi_job):
    job = mpi_job(3, PROGRAM.format(timeout=4, wrap="", act="threading.Event().wait()"))
    job.expect("begun", "rank 1 has not come within 4 s (rank 1 is at program.py:12, in <module>)", status=None)


def test_a_rank_that_shuts_down_while_others_average(mpi_job):
    job = mpi_job(3, PROGRAM.format(timeout=300, wrap="jax.jit", act="break"))
    told = "worker1 (rank 1) will not come, it is in jdistgrad.shutdown(), at program.py:16"
    job.expect("begun", told, "ranks with fewer batches need DataParallel.join()", status=None)


ONLY_ON_RANK_0 = """
import threading
import jdistgrad as jd

me = jd.init()
if me.rank == 0:
    jd.DataParallel(timeout=0.3)
threading.Event().wait()
jd.shutdown()
"""


def test_ranks_that_are_stuck_while_another_makes_collectives_are_named(mpi_job):
    job = mpi_job(3, ONLY_ON_RANK_0)
    job.expect("new collectives: ranks [1, 2] have not come within 0.3 s", status=None)
    job.expect("rank 1 is at program.py:8, in <module>; rank 2 is at program.py:8, in <module>", status=None)


def test_a_rank_that_raises_while_others_wait_for_its_answer_and_for_it(mpi_job):
    # With ``try: ... finally: shutdown()``, the rank's traceback comes first, and no rank waits for it.
    job = mpi_job(
        3,
        """
        import threading
        import jax.numpy as jnp
        import jdistgrad as jd

        def never():
            threading.Event().wait()

        me = jd.init(timeout=200)
        try:
            if me.rank == 2:
                raise RuntimeError("no data")
            if me.rank == 1:
                jd.DataParallel().average(jnp.ones(3))
            jd.rpc_sync(2, never)
        finally:
            jd.shutdown()
        """,
    )
    job.expect("RuntimeError: no data", "ending the job", status=None)
    assert job.output.count('raise RuntimeError("no data")') == 1, job.output  # in its traceback
    before, after = job.output.split('raise RuntimeError("no data")')
    assert not [text for text in ("WorkerLostError", "ending the job") if text in before], job.output
    assert re.search(r"worker2 \(rank 2\) (failed|is lost: it left with shutdown\(\))", after), job.output


def test_an_exit_without_an_error_shuts_down_as_ever(mpi_job):
    mpi_job(
        3,
        """
        import operator, sys, time
        import jdistgrad as jd

        me = jd.init()
        try:
            if me.rank != 1:
                sys.exit(0)
            time.sleep(0.5)
            assert jd.rpc_sync(0, operator.add, args=(1, 2)) == 3
            print("served", flush=True)
        finally:
            jd.shutdown()
        """,
    ).expect("served")
