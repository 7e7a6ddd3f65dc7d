"""Jobs that go on: beside the program's own use of MPI, long computations, and after suspension."""


def test_mpi_initialised_by_the_program_and_a_rank_that_computes_for_long(mpi_job):
    # Importing does not start MPI; and who serves a long call is not taken for hung.
    mpi_job(
        3,
        """
        import math, operator, sys, time
        import jdistgrad as jd, jdistgrad.cli.main
        assert "mpi4py.MPI" not in sys.modules
        from mpi4py import MPI
        total = MPI.COMM_WORLD.allreduce(1)
        me = jd.init()
        assert jd.rpc_sync((me.rank + 1) % 3, operator.add, args=(total, 1)) == 4
        MPI.COMM_WORLD.Barrier()
        if me.rank == 0:
            jd.rpc_sync(1, time.sleep, args=(3,), timeout=math.inf)
            print("answered", flush=True)
        jd.shutdown()
        assert MPI.COMM_WORLD.allreduce(2) == 6
        MPI.Finalize()
        print("done", flush=True)
        """,
        JDISTGRAD_HEARTBEAT="0.2",
        JDISTGRAD_SILENCE="1",
    ).expect("answered", "done")


def test_a_job_that_stood_still_goes_on(mpi_job):
    # After Ctrl-Z or a suspended machine, every rank resumes among others that have been silent for a long time.
    mpi_job(
        3,
        """
        import operator, os, subprocess, time
        from mpi4py import MPI
        import jdistgrad as jd

        job = " ".join(map(str, MPI.COMM_WORLD.allgather(os.getpid())))

        def main():
            me, woke, looked = jd.init(), 0, time.monotonic()
            if me.rank == 0:
                subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {job}; sleep 4.5; kill -CONT {job}"])
            while woke < 100:
                assert jd.rpc_sync((me.rank + 1) % 3, operator.add, args=(1, 2)) == 3
                before, looked = looked, time.monotonic()
                woke += woke > 0 or looked - before > 3
            jd.shutdown()
            print("went on", flush=True)

        main()
        """,
        JDISTGRAD_HEARTBEAT="0.5",
        JDISTGRAD_SILENCE="3",
    ).expect(*["went on"] * 3)
