"""Jobs whose ranks reduce over their devices: the start of jax.distributed, ranks that hang, fail or die in a step."""

STEP = """
    import sys
    import jax, jax.numpy as jnp
    import jdistgrad as jd
    me = jd.init(devices=True)
    dp = jd.DataParallel(jd.collectives.Devices(), timeout=4)
    step = dp.value_and_grad(lambda p, x: (p * x).sum())
"""


def test_a_start_that_cannot_be(mpi_job):
    job = mpi_job(
        3,
        """
    from mpi4py import MPI
    import jax, jax.numpy as jnp
    import jdistgrad as jd
    rank = MPI.COMM_WORLD.rank

    def told(use):
        try:
            use()
        except (jd.WorldError, jd.CollectiveError) as error:
            print("told:", error, flush=True)

    told(lambda: jd.init(devices=rank == 1))
    jd.init()
    told(jd.collectives.Devices)
    jd.shutdown()
    jnp.ones(2)
    told(lambda: jd.init(devices=True))
    """,
    ).expect("Call jd.init(devices=True)")
    for said in (
        "told: init: the workers disagree on devices: rank 0 has False, rank 1 has True. Give init the same devices",
        "Devices: ranks [0, 1, 2] of 3 see only their own devices",
        "told: init(devices=True): ranks [0, 1, 2] have opened their devices already",
    ):
        assert job.output.count(said) == 3, job.output


def test_a_start_of_some_ranks_alone(mpi_job):
    mpi_job(
        3,
        """
    import socket
    from mpi4py import MPI
    import jax
    import jdistgrad as jd
    rank = MPI.COMM_WORLD.rank
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = MPI.COMM_WORLD.bcast("127.0.0.1:%d" % held.getsockname()[1])
    if rank != 1:
        jax.distributed.initialize(address, 2, rank // 2, cluster_detection_method="deactivate")
    jd.init(devices=True)
    """,
    ).expect("init(devices=True): of 3 ranks only [0, 2] have started jax.distributed", status=None)


def test_a_rank_that_hangs_inside_a_step_is_told_by_every_rank(mpi_job):
    job = mpi_job(
        3,
        STEP
        + """
    _, gradients = step(jnp.ones(3), jnp.full(3, float(me.rank)))
    assert gradients.tolist() == [1, 1, 1], gradients
    assert len(gradients.devices()) == 1 and jax.device_count() == 3
    print("right", dp)
    def loss(p, x):
        start = jnp.full(3, 0.1)
        return (p * jax.lax.while_loop(lambda y: y.sum() < 1, lambda y: y * x.sum(), start)).sum()
    endless = dp.value_and_grad(loss)
    endless(jnp.ones(3), jnp.full(3, 1.0))
    print("one step", flush=True)
    endless(jnp.ones(3), jnp.full(3, 1.0 if me.rank else 0.0))[1].block_until_ready()  # here
    """,
        timeout=100,
        # a proxy that does not exist, and a port that JAX would have taken
        http_proxy="http://127.0.0.1:9",
        https_proxy="http://127.0.0.1:9",
    ).expect("has waited 4 s for step 3, a program over all devices. Still in it too: worker", status=None)
    assert "right DataParallel(Devices(rank=2, size=3, device=" in job.output, job.output
    assert "did not end within 4 s; ending the job" in job.output
    for rank in range(3):
        assert f"jdistgrad: worker{rank} (rank {rank}) has waited 4 s for step 3" in job.output, job.output
    assert "in <module>" in job.output


def test_a_rank_that_is_killed_in_a_step_is_named(mpi_job):
    mpi_job(
        3,
        STEP
        + """
    import os, signal, threading, time
    def loss(p, x):
        return jax.lax.while_loop(lambda y: y.sum() < 1, lambda y: y * 1, jnp.zeros(3) + p * 0 * x).sum() + p.sum()
    if me.rank == 1:
        threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    dp.value_and_grad(lambda p, x: jax.lax.stop_gradient(loss(p, x)) + p.sum())(jnp.ones(3), jnp.ones(3))
    time.sleep(20)
    print("nobody noticed")
    """,
    ).expect("process rank 1 with PID", "exited on\nsignal 9", status=None)


def test_a_device_without_memory_for_a_step_ends_the_job_and_says_why(mpi_job):
    mpi_job(
        3,
        STEP
        + """
    import resource
    def loss(p, x):
        return (jnp.sin(x[:, None] * p[None, :]) @ jnp.sin(p)).sum()
    step = dp.value_and_grad(loss)
    if me.rank == 1:
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 28), resource.RLIM_INFINITY))
    step(jnp.ones(10_000), jnp.ones(10_000))[1].block_until_ready()
    """,
    ).expect(
        "worker1 (rank 1): step 1: this rank failed, and the others wait for it: RESOURCE_EXHAUSTED: Out of memory",
        status=None,
    )


def test_a_rank_that_works_on_in_a_program_or_after_it_is_not_given_up(mpi_job):
    mpi_job(
        2,
        STEP
        + """
    import time
    everybody = jd.collectives.Devices()
    def long(x, number):
        total = everybody.allreduce(x)
        return jax.lax.while_loop(lambda y: y[0] < number, lambda y: (y[0] + 1, jnp.tanh(y[1] @ y[1])), (0, total))[1]
    program = everybody.jit(long)
    program(jnp.ones((300, 300)), 1).block_until_ready()
    begun = time.monotonic()
    program(jnp.ones((300, 300)), 100).block_until_ready()
    rounds = int(8 * 100 / (time.monotonic() - begun))
    program(jnp.ones((300, 300)), 0 if me.rank else rounds).block_until_ready()
    jd.shutdown()
    time.sleep(0 if me.rank else 4)
    print("the end of", me.rank)
    """,
        JDISTGRAD_SILENCE="2",
        JDISTGRAD_HEARTBEAT="1",
    ).expect("the end of 0", "the end of 1")
