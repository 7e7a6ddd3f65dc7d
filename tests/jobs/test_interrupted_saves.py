"""Ctrl-C on one rank inside save or restore: the others are told at once, and all may call it again."""

import pytest

PROGRAM = """
    import os, signal
    import jax, jax.numpy as jnp
    import jdistgrad as jd
    from jdistgrad.wire.polling import poll

    FOLDER, INTERRUPTED = {folder!r}, {folder!r} + "-interrupted"

    @jax.tree_util.register_pytree_node_class
    class Does:  # something within save, between two meetings
        def __init__(self, act):
            self.act = act

        def tree_flatten(self):
            self.act()
            return (), None

        @classmethod
        def tree_unflatten(cls, kept, leaves):
            return cls(lambda: None)

    def interrupt():
        signal.raise_signal(signal.SIGINT)

    def interrupt_soon():
        signal.setitimer(signal.ITIMER_REAL, 0.3)

    def wait_for_interrupt():
        assert poll(lambda: os.path.exists(INTERRUPTED), 50)

    signal.signal(signal.SIGALRM, lambda number, frame: interrupt())
    me = jd.init()
    jd.save(FOLDER, 1, jnp.ones(3))
    {before}
    act = {{{acts}}}.get(me.rank, lambda: None)
    try:
        jd.{call}
        print(me.rank, "done", flush=True)
    except jd.CheckpointError as error:
        print(me.rank, "is told:", error, flush=True)
    except KeyboardInterrupt:
        print(me.rank, "interrupted", flush=True)
        open(INTERRUPTED, "w").close()
        {after}
    jd.save(FOLDER, 3, jnp.ones(3) * 2)
    print(me.rank, "restored", *jd.restore(FOLDER, jnp.ones(3)), flush=True)
    jd.shutdown()
"""

SAVE = "save(FOLDER, 2, (Does(act), jd.per_worker(jnp.ones(3))))"
RESTORE = "restore(FOLDER, (Does(act), jnp.ones(3)))[0]"
RESTORED = [f"{rank} restored 3 [2. 2. 2.]" for rank in range(3)]


def program(folder, call, acts, before="", after=""):
    return PROGRAM.format(folder=str(folder / "checkpoints"), call=call, acts=acts, before=before, after=after)


@pytest.mark.parametrize("call", [SAVE, RESTORE])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_are_told_of_ctrl_c_on_one_rank(mpi_job, tmp_path, call, rank):
    job = mpi_job(3, program(tmp_path, call, f"{rank}: interrupt"))
    job.expect(f"{rank} interrupted", *RESTORED)
    told = f"Ctrl-C has ended it on worker{rank} (rank {rank}). Call it again on every worker."
    assert job.output.count(told) == 2, job.output


def test_all_are_told_of_ctrl_c_in_the_wait_for_others(mpi_job, tmp_path):
    job = mpi_job(3, program(tmp_path, SAVE, "0: wait_for_interrupt, 1: interrupt_soon"))
    job.expect("1 interrupted", *RESTORED)
    assert job.output.count(" is told: ") == 2, job.output


def test_a_save_that_waits_for_late_ranks_may_be_interrupted_and_called_again(mpi_job, tmp_path):
    before = "wait_for_interrupt() if me.rank == 0 else None; interrupt_soon() if me.rank == 1 else None"
    job = mpi_job(3, program(tmp_path, SAVE, "", before, f"jd.{SAVE}"))
    job.expect("0 done", "1 interrupted", "2 done", *RESTORED)
