"""Jobs that go on without ranks that die or fail: what the others compute, know and hold at the end."""

import os
import subprocess
import sys
import textwrap

import pytest
from helpers.jobs import PATH, Job

PREFACE = """
    import os
    import re
    import signal
    import sys
    import threading
    import time

    import jax.numpy as jnp

    import jdistgrad as jd

    def square(x):
        return x * x

    def slow_square(x):
        time.sleep(1)
        return x * x

    def make(size):
        return jnp.arange(float(size))

    def weigh(params, x):
        return params * x

    kept = []

    def keep(reference):
        kept.append(reference)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def until(condition):
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)

    def lost_error(do):
        try:
            do()
        except jd.WorkerLostError as error:
            return "; ".join([str(error), *getattr(error, "__notes__", [])])
        raise AssertionError("no WorkerLostError")

    told = {}
"""


@pytest.fixture
def surviving_job(tmp_path):
    """Return a function that runs a program by `jdistgrad run --survive`."""

    def run(n, source, **environment):
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(PREFACE) + textwrap.dedent(source))
        done = subprocess.run(
            [sys.executable, "-m", "jdistgrad", "run", "--survive", "-n", str(n), str(script)],
            env={**os.environ, "PYTHONPATH": PATH, **environment},
            text=True,
            timeout=100,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return Job(done)

    return run


def test_trainers_are_lost_and_the_others_go_on(surviving_job):
    job = surviving_job(
        4,
        """
        me = jd.init(["server", "first", "killed", "raises"])
        jd.on_lost(lambda worker, why: told.update({worker.name: why}))
        params = jd.remote("server", make, args=(3,))
        if me.rank > 1:
            params.to_here()  # made: a request that is on its way is lost with its worker
            jd.rpc_sync("first", keep, args=(jd.by_reference(params),))
            more = [jd.remote("server", make, args=(4,)) for _ in range(5)]
            del params
            if me.name == "killed":
                die()
            raise ValueError("no more data")
        elif me.name == "first":
            until(lambda: len(kept) == 2 and len(told) == 2)
            waiting = lost_error(lambda: jd.rpc_sync("killed", square, args=(2,)))
            assert "killed (rank 2) is lost" in waiting and "square" in waiting, waiting
            gradient = jd.grad(lambda p: jd.rpc_sync("server", weigh, args=(p, jnp.ones(3))).sum())(params)
            assert gradient.to_here().tolist() == [1, 1, 1]
            assert [one.to_here().tolist() for one in kept] == [[0, 1, 2]] * 2
            del gradient
            kept.clear()
        else:
            until(lambda: len(told) == 2)
        del params
        left = jd.shutdown(timeout=20)
        assert bool(left) == (me.rank == 0) and all("still owns" in one for one in left), left  # what the lost held
        print(me.name, sorted(told.items()))
        """,
    )
    whys = {"killed": "it was killed or ended", "raises": "it failed: ValueError: no more data"}
    for name in ("server", "first"):
        job.expect(f"{name} {sorted(whys.items())}")
    job.expect("the world went on without lost workers: ", *(f"is lost: {why}" for why in whys.values()))


# As if two ranks each were on one machine. Programs that use it fix the machine before anything starts MPI.
ON_MACHINES = """
        from jdistgrad.wire import mpi_failures
        machine = int(os.environ["OMPI_COMM_WORLD_RANK"]) // 2
        mpi_failures.this_process = lambda: (f"machine{machine}", os.getpid())
"""


def test_a_stopped_worker_is_killed_though_only_the_shutdown_waits_for_it(surviving_job):
    """By those of its machine."""
    job = surviving_job(
        4,
        ON_MACHINES
        + """
        me = jd.init()
        jd.on_lost(lambda worker, why: told.update({worker.rank: why}))
        if me.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if me.rank == 1:
            time.sleep(0.5)
            die()
        until(lambda: told)
        left = jd.shutdown(timeout=20)
        print(told[2], left, flush=True)
        if jd.rank() == 3:
            time.sleep(1)
            print("the last one ends", flush=True)
        """,
        JDISTGRAD_HEARTBEAT="0.3",
        JDISTGRAD_SILENCE="2",
    )
    job.expect("it gave no sign of life for 2 s []", "the last one ends")
    assert "ending the job" not in job.output


def test_a_context_and_a_map_without_those_that_are_lost(surviving_job):
    """The worker that waits for a contribution has no call to the dead one; its opener has."""
    surviving_job(
        3,
        """
        from jdistgrad.autograd.tape.ledger import REFERENCE, Target
        from jdistgrad.autograd.tape.tape import current_tape

        def wait_for_a_contribution():
            return current_tape(lambda: "a gradient").ledger.take(Target(REFERENCE, 7), (1.0, 2.0, 3.0, 4.0, 5.0))

        def rank_of(item):
            return jd.rank()

        me = jd.init()
        jd.on_lost(lambda worker, why: told.update({worker.rank: why}))
        if me.rank == 0:
            with jd.context() as ctx:
                waits = jd.rpc_async(2, wait_for_a_contribution)
                jd.rpc_sync(1, square, args=(2,))
                jd.rpc_async(1, die)
                text = lost_error(waits.result)
                assert "context 0:" in text and "worker1 (rank 1) is lost" in text, text
            for victim, left in ((1, {2}), (2, {0})):
                until(lambda: victim in told)
                assert set(jd.map(rank_of, range(4))) == left, left
                print(f"without {victim}", flush=True)
                if victim == 1:
                    jd.rpc_async(2, die)
        jd.shutdown()
        """,
    ).expect("without 1", "without 2")


def test_survivors_save_and_restore_whoever_is_lost(surviving_job, tmp_path):
    """First worker 0 is lost, at whose desk all had met, then another one; only some know of it when they save."""
    job = surviving_job(
        4,
        f"""
        folder = {str(tmp_path / "saved")!r}
        me = jd.init()
        jd.on_lost(lambda worker, why: told.update({{worker.rank: why}}))
        held = jd.remote(me, make, args=(me.rank,))
        jd.save(folder, 1, {{"w": jnp.ones(2), "held": jd.per_worker(held)}})
        if me.rank == 0:
            die()
        if me.rank == 2:
            until(lambda: told)
        jd.save(folder, 2, {{"w": 2 * jnp.ones(2), "held": jd.per_worker(held)}})
        if me.rank == 1:
            die()
        if me.rank == 3:
            until(lambda: len(told) == 2)
        jd.save(folder, 3, {{"w": 3 * jnp.ones(2), "held": jd.per_worker(held)}})
        step, trees = jd.restore(folder, {{"w": jnp.ones(2), "held": jd.per_worker(held)}})
        print(me.name, step, trees["w"].tolist(), trees["held"].to_here().tolist())
        del held, trees
        jd.shutdown(timeout=20)
        """,
    )
    job.expect("worker2 3 [3.0, 3.0] [0.0, 1.0]", "worker3 3 [3.0, 3.0] [0.0, 1.0, 2.0]")


def test_a_worker_that_dies_while_it_writes_or_reads_its_part_is_a_lost_worker_to_all_callers(surviving_job, tmp_path):
    """Also one that is no caller, but at whose desk they meet. What is left can save and restore again."""
    job = surviving_job(
        5,
        f"""
        import jax

        folder, armed = {str(tmp_path / "saved")!r}, []

        @jax.tree_util.register_pytree_node_class
        class Dies:
            def tree_flatten(self):
                if armed:
                    die()
                return (), None

            @classmethod
            def tree_unflatten(cls, kept, leaves):
                return cls()

        def make_dying():
            return Dies(), jnp.ones(3)

        def arm():
            armed.append(True)

        def told_of(victim, do):
            try:
                do()
            except jd.WorkerLostError as error:
                assert error.worker.rank == victim, error
                print(me.rank, "is told:", error, flush=True)
            else:
                raise AssertionError("no WorkerLostError")

        me, callers = jd.init(), [1, 2, 3]
        if me.rank in callers:
            first, second = jd.per_worker(jd.remote(0, make_dying)), jd.per_worker(jd.remote(4, make_dying))
            jd.save(folder, 1, second, workers=callers)
            jd.rpc_sync(0, arm)
            told_of(0, lambda: jd.save(folder, 2, first, workers=callers))
            jd.rpc_sync(4, arm)
            told_of(4, lambda: jd.restore(folder, second, workers=callers))
            third = jd.per_worker(jd.remote(me, make_dying))
            jd.save(folder, 3, third)
            print(me.rank, "restored step", jd.restore(folder, third)[0], flush=True)
            del first, second, third
        jd.shutdown(timeout=20)
        """,
    )
    for rank in range(1, 4):
        job.expect(
            f"{rank} is told: save: worker0 (rank 0) could not write its part of step 2 in ",
            f"{rank} is told: restore of ",
            f"{rank} restored step 3",
        )


def test_steps_in_which_ranks_die_are_done_again_without_them(surviving_job):
    """Ranks 0 and 2 die between two buckets of a step. The hook counts its steps, each of which must count once.

    MPI learns only of processes that are killed, so `jdistgrad run` makes mpirun see the other one as killed too.
    """
    surviving_job(
        4,
        """
        import jax
        import numpy as np

        me = jd.init()
        counted = {}

        def apply(bucket, count, collectives):
            if bucket.index == 1 and (me.rank, count) == (0, 3):
                die()
            if bucket.index == 1 and (me.rank, count) == (2, 6):
                os._exit(0)
            counted[bucket.index] = count
            return collectives.allreduce(bucket.flat / bucket.divisor), count + 1

        hook = jd.hooks.Hook(lambda bucket: 0, apply, "dying")
        dp = jd.DataParallel(hook=hook, bucket_cap_mb=1e-5, find_unused_parameters=True, timeout=60)
        step = dp.value_and_grad(lambda p, x: (p["a"] * me.rank**2).sum() + (p["b"] @ x).sum() * me.rank**2)
        params = dp.broadcast({"a": jnp.ones(3), "b": jnp.ones((2, 5)), "c": jnp.ones(())}, root=2)
        sizes, sums = [], []
        for number in range(9):
            value, gradients = step(params, jnp.ones((5, 1 + me.rank)))
            sizes.append(dp.statistics().size)
            sums.append(float(gradients["a"][0]))
            assert set(counted.values()) == {number}, (number, counted)
            assert dp.used == {"a": True, "b": True, "c": False}
        assert sizes == [4, 4, 4, 3, 3, 3, 2, 2, 2], sizes
        np.testing.assert_allclose(sums, [3.5] * 3 + [14 / 3] * 3 + [5] * 3, rtol=1e-6)
        assert dp.statistics().rank == me.rank
        assert dp.average({"x": jnp.full(2, 2.0 + me.rank)})["x"].tolist() == [4, 4]
        assert dp.mean({"x": me.rank})["x"] == 2
        assert dp.broadcast(jnp.ones(()) * me.rank, root=3) == 3
        dp.verify(params)
        try:
            dp.broadcast(params, root=2)
        except jd.errors.CollectiveError as error:
            assert "rank 2 of this group, worker2 (rank 2), is lost" in str(error), error
        text = lost_error(jd.DataParallel)
        assert "worker0 (rank 0) is lost" in text and "of_this_world([...])" in text, text
        again = jd.DataParallel(jd.collectives.of_this_world([1, 3]))
        assert again.mean({"x": me.rank})["x"] == 2
        print(me.name, jd.shutdown(timeout=20))
        """,
    ).expect(
        "worker1 []",
        "worker3 []",
        "data-parallel steps continue on 3 ranks, without worker0 (rank 0)",
        "data-parallel steps continue on 2 ranks, without worker2 (rank 2)",
    )


def test_what_does_not_go_on_without_a_rank_says_so(surviving_job):
    surviving_job(
        4,
        """
        import jax

        me = jd.init()
        dp = jd.DataParallel(timeout=60)
        like = {"x": jnp.ones(3), "y": jnp.ones((2, 2))}
        dp.average(like)
        jax.jit(dp.average)(like)
        reduction = dp.reduction(like)
        reduction.ready(1, jnp.ones((2, 2)))
        if me.rank == 1:
            die()
        reduction.ready(0, jnp.ones(3))
        text = lost_error(reduction.finish)
        assert "Repeat the step" in text, text
        reduction = dp.reduction(like)
        reduction.ready(0, jnp.ones(3) * me.rank)
        reduction.ready(1, jnp.ones((2, 2)))
        assert jnp.allclose(reduction.finish()[0], 5 / 3)
        text = lost_error(jd.barrier)
        assert "worker1 (rank 1) is lost" in text, text

        from jdistgrad.wire.mpi_failures import Failures

        find = Failures.find

        def find_late(self):  # the collectives learn of the death first
            time.sleep(0.2)
            return find(self)

        Failures.find = find_late

        def join():
            with dp.join():
                if me.rank == 3:
                    die()
                for _ in range(2):
                    dp.average(like)

        text = lost_error(join)
        assert "worker3 (rank 3) is lost" in text, text
        print(me.name, jd.shutdown(timeout=20))
        """,
    ).expect("worker0 []", "worker2 []", "averages inside jax.jit do not survive the death of a rank")


def test_ranks_that_have_died_keep_a_world_from_opening_and_are_named(surviving_job):
    surviving_job(
        3,
        """
        me, errors = jd.init(), []
        jd.on_lost(lambda worker, why: 1 / 0)

        @jd.on_lost
        def stop(worker, why):  # cannot end the world that waits for it
            try:
                jd.shutdown(timeout=5)
            except jd.WorldError as error:
                errors.append(str(error))
            told[worker.rank] = why

        if me.rank == 1:
            die()
        until(lambda: told)
        assert "serves __main__.stop (on_lost)" in errors[0], errors
        jd.shutdown(timeout=20)
        try:
            jd.init(timeout=20)
        except jd.WorldError as error:
            print(me.rank, 1 in error.missing, error)
        """,
    ).expect(
        "0 True init: ranks [",
        "2 True init: ranks [",
        "] of 3 have died or ended",
        "worker2 (rank 2): a callback of on_lost failed for worker1 (rank 1)",
    )


def test_a_rank_that_dies_while_the_ranks_meet_is_named_long_before_the_timeout(surviving_job):
    job = surviving_job(
        3,
        """
        from jdistgrad.wire.mpi_job import MPIJob

        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            MPIJob.gather = lambda *args: die()
        jd.init(timeout=90)
        """,
    )
    job.expect("init: ranks [1] of 3 have died or ended", status=None)


def test_a_rank_that_dies_is_named_where_the_world_does_not_go_on(surviving_job):
    job = surviving_job(
        3,
        """
        jd.init(survive=False)
        dp = jd.DataParallel()
        dp.average(jnp.ones(3))
        if jd.rank() == 1:
            die()
        dp.average(jnp.ones(3))
        """,
    )
    job.expect("WorkerLostError: the worker of rank 1 is lost: it was killed or ended. Use init(survive", status=None)


def test_collectives_that_lose_a_rank_while_they_are_made_say_so(surviving_job):
    surviving_job(
        3,
        """
        me, earlier = jd.init(), jd.collectives.MPI()
        if me.rank == 1:
            jd.rpc_sync(2, keep, args=(1,))
            die()
        for make in (jd.DataParallel, earlier.twin):
            try:
                make()
            except jd.WorkerLostError as error:
                print(make.__name__, error, flush=True)
        jd.shutdown(timeout=20)
        """,
    ).expect(
        *(
            f"{name} worker{rank} (rank {rank}) (new collectives): worker1 (rank 1) is lost"
            for name in ("DataParallel", "twin")
            for rank in (0, 2)
        )
    )


def test_a_job_of_which_no_rank_is_left_has_failed(surviving_job):
    surviving_job(2, "jd.init()\nraise ValueError('all of us')").expect("none of the 2 ranks came to its end", status=1)


def test_a_rank_that_fails_after_the_end_of_the_world_counts(surviving_job):
    surviving_job(
        3,
        """
        me = jd.init()
        jd.shutdown(timeout=20)
        assert me.rank != 1, "the result is wrong"
        """,
    ).expect("AssertionError: the result is wrong", status=1)


def test_a_job_that_was_not_started_to_survive_says_so(mpi_job):
    mpi_job(
        2,
        """
        import jdistgrad as jd
        for settings in {}, {"devices": True}:
            try:
                jd.init(survive=True, **settings)
            except jd.WorldError as error:
                print(error, flush=True)
        """,
    ).expect(
        "init(survive=True): this job was not started to go on without a rank that dies",
        "jax.distributed ends all processes when one dies",
        status=None,
    )


def test_a_pipeline_without_a_lost_worker_goes_on(surviving_job):
    """A stage's worker is killed in a step: the driver knows whom it has lost, and trains on with the others."""
    job = surviving_job(
        4,
        """
        from jdistgrad import pipeline as pp

        def make_stage(size):
            return jnp.ones(size)

        def scale(params, x):
            return x * params

        def scale_and_die(params, x):
            if len(x) == 3:  # while it is traced for the second batch
                die()
            return x * params

        def mean(output, target):
            return jnp.mean(output - target)

        def step(functions, workers, rows):
            refs = [jd.remote(worker, make_stage, args=(4,)) for worker in workers]
            schedule = pp.one_f_one_b(len(workers), 2)
            pipeline = jd.Pipeline(list(zip(functions, refs)), schedule, loss=mean)
            x = jnp.ones((2 * rows, 4))
            with jd.context() as ctx:
                return float(pipeline.step(x, targets=0 * x))

        me = jd.init()
        if me.rank == 0:
            assert step([scale, scale, scale_and_die, scale], [0, 1, 2, 3], 2) == 1
            error = lost_error(lambda: step([scale, scale, scale_and_die, scale], [0, 1, 2, 3], 3))
            assert "worker2 (rank 2): lost, with stages [2]" in error, error
            assert re.search(r"worker[01] .*: [01][FB][01]: stage [01], .*waiting for stage [12]", error), error
            print("after the loss:", step([scale] * 3, [0, 1, 3], 3))
        print(f"rank {me.rank}", jd.shutdown(timeout=20))
        """,
    )
    job.expect("after the loss: 1.0")
    for rank in (0, 1, 3):
        job.expect(f"rank {rank} []")


def test_a_receiver_is_told_of_a_lost_sender(surviving_job):
    surviving_job(
        3,
        """
        import contextlib

        import jax

        me = jd.init()
        c, like = jd.collectives.of_this_world(), jax.ShapeDtypeStruct((3,), jnp.float32)
        if me.rank == 1:
            time.sleep(0.3)
            die()
        assert "recv from rank 1" in lost_error(lambda: c.recv(like, 1, after=None))
        try:
            jax.jit(lambda: c.recv(like, 1, after=None))()
        except jax.errors.JaxRuntimeError as error:  # as programs of jax.jit put all errors
            assert "WorkerLostError" in str(error) and "recv from rank 1" in str(error), error
        else:
            raise AssertionError("a receiver got something from the lost")
        other = 2 - me.rank
        c.send(jnp.ones(1 << 20), other, tag=1)  # the next send looks after this one, which is under way
        for _ in range(3):
            with contextlib.suppress(jd.WorkerLostError):
                c.send(jnp.ones(1 << 20), 1)
        c.send(jnp.full(3, me.rank, jnp.float32), other)
        print(me.rank, "got", c.recv(like, other, after=None), flush=True)
        jd.shutdown()
        """,
    ).expect("0 got [2. 2. 2.]", "2 got [0. 0. 0.]")


FAILING = """
    import jax

    def checked(x):
        if number == 3 and where.get(me.rank) == "run":
            raise ValueError("no data")
        return x

    def loss(p, x):
        y = jax.pure_callback(checked, x, x)
        return (p["a"] * y[0]).sum() + (p["b"] * y[1]).sum()

    def apply(bucket, state, collectives):
        if number == 3 and where.get(me.rank) == "hook" and bucket.index == 1:
            raise ValueError("no data")
        return collectives.allreduce(bucket.flat / bucket.divisor), state

    me = jd.init()
    hook = jd.hooks.Hook(lambda bucket: 0, apply, "failing") if "hook" in where.values() else None
    dp = jd.DataParallel(hook=hook, bucket_cap_mb=1e-5, timeout=60)
    step = dp.value_and_grad(loss)
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 5))}

    def take():
        return step(params, jnp.full(2, float(me.rank)))[1]
"""


def test_steps_go_on_without_ranks_that_an_exception_in_a_step_ends(surviving_job):
    surviving_job(
        4,
        "    where = {1: 'run', 2: 'hook'}\n"
        + FAILING
        + """
    for number in range(6):
        gradients = take()
        there = [0, 1, 2, 3] if number < 3 else [0, 3]
        assert dp.statistics().size == len(there), (number, dp.statistics())
        for leaf in gradients.values():
            assert abs(leaf - sum(there) / len(there)).max() < 1e-6, (number, gradients)
    print(me.name, jd.shutdown(timeout=20))
    """,
    ).expect("worker0 []", "worker3 []", "ValueError: no data")


def test_a_step_that_fails_on_a_rank_that_goes_on_fails_on_all(surviving_job):
    """The others wait a while whether the exception ends that rank; meanwhile it waits for them in new collectives."""
    surviving_job(
        3,
        "    where = {1: 'run'}\n"
        + FAILING
        + """
    for number in range(4):
        try:
            take()
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
    assert "no data" in failed if me.rank == 1 else failed.startswith("DisagreementError: the ranks"), failed
    assert me.rank == 1 or "rank 1 has failed at bucket 0 in step 4" in failed, failed
    again, number = jd.DataParallel(), 4
    assert again.mean({"x": me.rank})["x"] == 1
    try:
        take()
    except jd.errors.DisagreementError:
        print(me.name, again.mean({"x": me.rank})["x"], jd.shutdown(timeout=20))
    """,
    ).expect("worker0 1.0 []", "worker1 1.0 []", "worker2 1.0 []")
