"""A rank that stands still while all save: the others wait no longer than the allowed silence."""


def test_a_rank_that_is_stopped_in_save_is_named(mpi_job, tmp_path):
    job = mpi_job(
        3,
        f"""
        import os, signal
        import jax, jax.numpy as jnp
        import jdistgrad as jd

        @jax.tree_util.register_pytree_node_class
        class Stops:
            def tree_flatten(self):  # within save
                if jd.rank() == 2:
                    os.kill(os.getpid(), signal.SIGSTOP)
                return (), None

            @classmethod
            def tree_unflatten(cls, kept, leaves):
                return cls()

        jd.init()
        try:
            jd.save({str(tmp_path / "checkpoints")!r}, 1, (Stops(), jnp.ones(3)))
        except jd.WorkerLostError as error:
            print(f"worker{{jd.rank()}} is told: {{error}}", flush=True)
            raise
        jd.shutdown()
        """,
        JDISTGRAD_HEARTBEAT="0.3",
        JDISTGRAD_SILENCE="3",
    )
    lost = "1): worker2 (rank 2) is lost: it gave no sign of life for 3 s"
    job.expect("worker0 is told: save(", lost, status=None)
    assert not list((tmp_path / "checkpoints").glob("*"))
