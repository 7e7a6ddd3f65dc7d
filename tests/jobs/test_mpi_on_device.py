"""Jobs whose ranks reduce arrays where they lie, by mpi4jax. Here they lie on CPU devices."""

import pytest

from jdistgrad.collectives import by_mpi4jax

STEPS = """
    import jax, jax.numpy as jnp
    import numpy as np
    import jdistgrad as jd
    from helpers.data import assert_close
    from helpers.models import batch, loss, parameters, serial

    me = jd.init()
    everybody = jd.collectives.MPI(on_device=True)
    rank, size, params = me.rank, everybody.size, parameters()
    batches = [batch(one, rows=one + 2) for one in range(size)]  # the ranks' programs need not be equal
    expected = serial(loss, params, batches)[1]
"""

# As in programs for GPUs, which call no Python of ours but JAX's callbacks.
AS_ON_GPUS = """
    from jdistgrad.collectives import host, mpi
    host.on_cpus = mpi.on_cpus = lambda: False
"""


REFUSALS = """
    bad = jax.tree.map(lambda p: p * jnp.nan, params) if rank == 1 else params
    step = jd.DataParallel(everybody, check_finite=True, check_parameters=False).value_and_grad(loss)
    try:
        step(bad, batches[rank])
        print("no error")
    except jd.NonFiniteError as error:
        print(f"rank {rank} says {error}")
    from jdistgrad.collectives import by_mpi4jax
    if rank == 1:
        by_mpi4jax.has_mpi4jax = lambda: False
        by_mpi4jax.refusal.cache_clear()
    try:
        jd.collectives.MPI(on_device=True)
        print("no error")
    except jd.CollectiveError as error:
        print(f"rank {rank} finds {error}")
"""

IN_HOST_MEMORY = """
    dp = jd.DataParallel(jd.collectives.MPI(), bucket_cap_mb=2e-4)
    averages = jax.jit(lambda p: jax.lax.fori_loop(0, 2, lambda _, p: dp.average(p), p))
    assert_close(averages(jax.tree.map(lambda p: p * rank, params)), params)
    assert_close(jax.jit(dp.value_and_grad(loss))(params, batches[rank])[1], expected)
    total = lambda x: (dp.collectives.allreduce(x * x) * rank).sum()
    assert_close(jax.jit(jax.grad(total))(jnp.arange(4.0) + rank), 6 * (jnp.arange(4.0) + rank))
"""


@pytest.mark.parametrize(
    ("programs", "then"), [("", REFUSALS), (AS_ON_GPUS, IN_HOST_MEMORY)], ids=["for CPUs", "as for GPUs"]
)
def test_steps_averages_and_operations(mpi_job, programs, then):
    job = mpi_job(
        3,
        programs
        + STEPS
        + """
    for settings in ({"bucket_cap_mb": 2e-4, "check_finite": True}, {"hook": jd.hooks.average()}):
        dp = jd.DataParallel(everybody, **settings)
        for _ in range(2):
            value, gradients = dp.value_and_grad(loss)(params, batches[rank])
            assert_close(gradients, expected)
        assert_close(value, loss(params, batches[rank]))
        assert_close(dp.average(jax.tree.map(lambda p: p * rank, params)), params)
    total = everybody.allreduce({"a": jnp.arange(3.0), "b": jnp.float32(rank)})
    assert_close(total, {"a": jnp.arange(3.0) * 3, "b": jnp.float32(3)})
    assert_close(everybody.allgather(jnp.float32(rank)), jnp.arange(3.0))
    assert_close(everybody.reduce_scatter(jnp.arange(6.0)), jnp.arange(6.0).reshape(3, 2)[rank] * 3)
    np.testing.assert_array_equal(jax.jit(everybody.allreduce)(jnp.ones(2)), [3, 3])
    assert_close(jax.jit(jd.DataParallel(everybody).average)(jax.tree.map(lambda p: p * rank, params)), params)
    try:
        everybody.allreduce(jnp.ones(2 + rank))
    except jd.DisagreementError as error:
        print("named:", error)
    print("right", dp)
"""
        + then
        + "\n    jd.shutdown()\n",
    ).expect("right DataParallel(MPI(rank=2, size=3, on_device=True)", "named:")
    if then is REFUSALS:
        for rank in range(3):
            job.expect(f"rank {rank} says step 1: the gradient of")
            job.expect(f"rank {rank} finds MPI(on_device=True): rank 1: mpi4jax is not installed")


def test_ranks_on_cpus_and_gpus_are_told_that_their_programs_reduce_in_other_ways(mpi_job):
    mpi_job(
        3,
        """
    import os
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        from jdistgrad.collectives import host, mpi
        host.on_cpus = mpi.on_cpus = lambda: False
    import jax, jax.numpy as jnp
    import jdistgrad as jd
    jd.init()
    try:
        jax.block_until_ready(jax.jit(jd.DataParallel().average)(jnp.ones(3)))
        print("no error")
    except Exception as error:
        print(error)
    jd.shutdown()
    """,
    ).expect(", by mpi4jax, rank 1 does compiled average")


def test_the_trial_in_a_process_of_its_own(tmp_path, monkeypatch):
    assert by_mpi4jax.trial() == ""
    crashing = tmp_path / "mpi4jax.py"
    crashing.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "ended with signal 11: this MPI takes no device pointers" in by_mpi4jax.trial()
    crashing.write_text("raise OSError('no MPI here')\n")
    assert by_mpi4jax.trial().endswith("in a separate process, failed: OSError: no MPI here.")


def test_a_trial_that_receives_other_numbers_fails(tmp_path, monkeypatch):
    (tmp_path / "mpi4jax.py").write_text("def sendrecv(x, *ranks, comm):\n    return x + 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # Python runs no assertions
    assert "received other numbers than were sent" in by_mpi4jax.trial()
