"""Jobs that fail: they end, and the message names the rank and the cause. The fixture ends jobs that hang."""


def test_a_rank_that_leaves_without_shutdown_ends_the_job(mpi_job):
    job = mpi_job(
        3,
        """
        import sys
        import jdistgrad as jd
        me = jd.init()
        if me.rank == 1:
            sys.exit(0)
        jd.shutdown()
        """,
    )
    job.expect("worker1 (rank 1) ended without calling jdistgrad.shutdown()", status=None)


def test_a_shutdown_that_waits_or_gives_up_says_for_what(mpi_job):
    # On stderr, without any setting of the logging module.
    job = mpi_job(
        3,
        """
        import time
        import jdistgrad as jd
        from jdistgrad.rpc import closing

        closing.SPEAK_SECONDS = 0.3
        me = jd.init()
        if me.rank == 0:
            jd.rpc_async(1, time.sleep, args=(40,))
            try:
                jd.shutdown(timeout=1)
            except jd.CallTimeoutError:
                pass
        else:
            jd.shutdown()
        """,
    )
    what = " s for worker1 (rank 1), which serves time.sleep, called by worker0 (rank 0) "
    told = "worker0 (rank 0) ended before it had left its world: shutdown of worker0 (rank 0): waited 1"
    job.expect("shutdown of worker0 (rank 0): waiting ", told + what, what, status=None)
    assert "without calling jdistgrad.shutdown()" not in job.output


def test_a_hung_rank_is_noticed(mpi_job):
    # A stopped process breaks no connection: only its silence shows that it hangs.
    job = mpi_job(
        3,
        """
        import math, os, signal, sys, time
        import jdistgrad as jd
        me = jd.init()
        if me.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if me.rank == 0:
            time.sleep(0.5)
            try:
                jd.rpc_sync(1, time.sleep, args=(0,), timeout=math.inf)
            except jd.WorkerLostError as error:
                print("lost:", error, flush=True)
                raise
        jd.shutdown()
        """,
        JDISTGRAD_HEARTBEAT="0.3",
        JDISTGRAD_SILENCE="2",
    )
    job.expect("lost: time.sleep on worker1 (rank 1)", "it gave no sign of life for 2 s", status=None)


def test_a_rank_that_never_joins_is_named(mpi_job):
    job = mpi_job(
        3,
        """
        import time
        import jdistgrad as jd
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 2:
            time.sleep(4)
        else:
            jd.init(timeout=1)
        """,
    )
    job.expect("init: ranks [2] of 3 did not call init within 1 s", status=None)


def test_duplicate_names_are_refused_on_every_rank_and_nothing_is_left(mpi_job):
    job = mpi_job(
        3,
        """
        import os

        import jdistgrad as jd

        errors = []  # whose tracebacks hold what init has made

        def refused():
            try:
                jd.init(name="ps")
            except jd.DuplicateNameError as error:
                print("refused:", error, flush=True)
                errors.append(error)
            return len(os.listdir("/proc/self/fd"))

        before = refused()  # the first opens what MPI and JAX keep
        assert refused() == before
        """,
    )
    job.expect("refused: init: ranks 0 and 1 both want the name 'ps'")
    assert job.output.count("refused:") == 6


def test_an_mpi_without_threads_is_named(mpi_job):
    job = mpi_job(
        3,
        """
        import mpi4py
        mpi4py.rc.thread_level = 'funneled'
        import jdistgrad as jd
        jd.init()
        """,
    )
    job.expect("WorldError: init: MPI runs with less than MPI_THREAD_MULTIPLE", status=None)


def test_a_program_waits_while_its_calls_have_too_many_bytes(mpi_job):
    """Calls of a MiB each to a slow worker. Calls made while serving do not wait: all might wait for each other."""
    mpi_job(
        3,
        """
        import time
        import numpy as np
        import jdistgrad as jd
        from jdistgrad.rpc.worker import current_worker

        def slow(k, array):
            time.sleep(0.02)
            return k + int(array[-1])

        def flood(number, to):
            calls, most, futures = current_worker().calls.pending, 0, []
            for k in range(number):
                futures.append(jd.rpc_async(to, slow, args=(k, np.ones(1 << 17))))
                most = max(most, calls.bytes)
            assert [future.result() for future in futures] == [k + 1 for k in range(number)]
            return most

        me = jd.init()
        if me.rank == 0:
            most = flood(30, 1)
            assert 4 << 20 < most < 6 << 20, most
            assert current_worker().calls.pending.bytes == 0
            assert jd.rpc_sync(1, flood, args=(12, 2)) > 6 << 20
        jd.shutdown()
        print("done", flush=True)
        """,
        JDISTGRAD_IN_FLIGHT="4",
    ).expect("done")


COMPUTING = """
    import contextlib, functools, os, signal, threading
    import jax, jax.numpy as jnp
    import jdistgrad as jd

    def double(x):
        return 2 * x

    @functools.partial(jax.jit, static_argnums=1)
    def compute_and_call(x, times):
        x = jax.lax.fori_loop(0, times, lambda _, x: jnp.tanh(x @ x), x)
        return jd.rpc_sync(1, double, args=(x[0, :2],))

    with jd.local_workers(2):
        zeros = jnp.zeros((300, 300))
        for times in (1, 500):
            jax.block_until_ready(compute_and_call(zeros, times))
        for _ in range(3):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):
                    jax.block_until_ready(compute_and_call(zeros, 500))
                threading.Event().wait(10)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            print("then", compute_and_call(zeros, 1), flush=True)
"""


def test_ctrl_c_while_a_compiled_program_computes_before_its_call(mpi_job):
    """XLA calls Python after that, where an exception would go nowhere. A notebook sets the handler for every cell."""
    job = mpi_job(1, COMPUTING, NPROC="1")  # as by `jdistgrad run` on few cores
    job.expect()
    assert [job.output.count(text) for text in ("interrupted\n", "then [0. 0.]\n")] == [3, 3], job.output
