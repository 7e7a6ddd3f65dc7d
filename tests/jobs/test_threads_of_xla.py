"""XLA has as many threads as cores: no program may occupy a thread while it waits for another worker."""

import textwrap

ON_TWO_CORES = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import jax, jax.numpy as jnp, numpy as np, optax
import jdistgrad as jd

def big(x):
    return sum(jnp.sin(x * k) for k in range(12))  # small programs run at once, whatever threads there are
"""


def on_two_cores(program):
    return ON_TWO_CORES + textwrap.dedent(program)


def test_compiled_code_of_more_workers_than_cores(mpi_job):
    # XLA runs programs whose arguments are still being copied on its own threads: if they wait for each other, it needs
    # one for each worker. Where the arguments are not there yet when a served function returns, its own calls come
    # later, and need its context.
    mpi_job(
        1,
        on_two_cores(
            """
            def collectives():
                me, c = jd.init(), jd.collectives.of_this_world()

                def f(x):
                    parts = [jnp.sin(x * k) for k in range(12)]
                    total = c.allreduce(jnp.stack([p.sum() for p in parts]))
                    return sum(jnp.cos(p) * total[k] for k, p in enumerate(parts))

                x = jnp.full((300, 300), 1.0 + me.rank)
                for _ in range(3):
                    found = jax.block_until_ready(jax.jit(f)(x))
                sums = [sum(float(jnp.sin((1.0 + r) * k)) for r in range(8)) * 90000 for k in range(12)]
                expected = sum(np.cos(np.sin((1.0 + me.rank) * k)) * sums[k] for k in range(12))
                np.testing.assert_allclose(found[0, 0], expected, rtol=1e-3)
                jd.shutdown()

            def copied():
                me, c = jd.init(), jd.collectives.of_this_world()
                step = jax.jit(lambda x: c.allreduce(x[0, :3]))
                for k in range(3):
                    large = np.full((4096, 4096), float(me.rank + k), np.float32)
                    np.testing.assert_array_equal(step(jnp.asarray(large)), 6.0 + 4 * k)
                jd.shutdown()

            def sharded():
                me = jd.init()
                tx, serial = jd.shard_state(optax.adan(1e-2)), optax.adan(1e-2)
                params = {"w": jnp.ones((300, 300)), "b": jnp.ones(7)}
                state, plain = tx.init(params), serial.init(params)
                update = jax.jit(tx.update)
                for k in range(3):
                    gradients = jax.tree.map(lambda p: jnp.sin(p * (k + 1)), params)
                    updates, state = update(gradients, state, params)
                    expected, plain = serial.update(gradients, plain, params)
                    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), updates, expected)
                jd.shutdown()

            @jax.jit
            def twice(x):
                return 2 * x

            @jax.jit
            def kept_elsewhere(x):
                return jd.remote(0, twice, args=(x,)).to_here()

            @jax.jit
            def passed_on(x):
                return jd.rpc_sync(1, kept_elsewhere, args=(x,))

            def late():
                me = jd.init(timeout=30)
                if me.rank == 0:
                    with jd.context():
                        x = jnp.ones((300, 300))
                        found = jax.jit(lambda x: jd.rpc_sync(2, passed_on, args=(x,)))(x)
                        np.testing.assert_array_equal(found, 2 * np.ones((300, 300)))
                jd.shutdown()

            jd.spawn(collectives, 8)
            jd.spawn(copied, 4)
            jd.spawn(sharded, 3)
            jd.spawn(late, 3)
            print("done", flush=True)
            """
        ),
    ).expect("done")


def test_a_rank_with_two_threads_that_waits_in_compiled_code_serves_calls(mpi_job):
    # NumPy's slices that begin anywhere in memory are copied, so XLA runs programs with them on its own threads.
    mpi_job(
        3,
        on_two_cores(
            """
            data = np.ones((1600, 1500), np.float32)
            norms = jax.jit(lambda x: jnp.sqrt((x * x).sum(axis=1)))
            everybody_is_asked = threading.Event()

            def largest(k):
                everybody_is_asked.wait()
                return float(norms(data[k : k + 1500]).max())

            me = jd.init(timeout=20)
            c = jd.collectives.of_this_world()
            total = jax.jit(lambda x: c.allreduce(x).sum())
            if me.rank == 0:
                threading.Timer(0.5, everybody_is_asked.set).start()  # the others wait for it; this rank goes on
            else:
                assert jd.rpc_sync(0, largest, args=(3 + me.rank,)) > 1
            assert total(data[3:1503]) == 3 * 1500 * 1500
            jd.shutdown()
            print("done", end="", flush=True)
            """
        ).replace("import os\n", "import os, threading\n", 1),
        NPROC="2",
    ).expect("donedonedone")


NESTED = """
@jax.jit
def leaf(x): return big(x)
@jax.jit
def c(x): return big(jd.rpc_sync(1, leaf, args=(big(x),)))
@jax.jit
def b(x): return big(jd.rpc_sync(0, c, args=(big(x),)))

def differentiate():
    x = jnp.linspace(0, 1, 90000).reshape(300, 300)
    with jd.context():
        found = jax.grad(lambda x: (jd.rpc_sync(0, b, args=(x,)) ** 2).sum())(x)
    expected = jax.grad(lambda x: (big(big(big(big(big(x))))) ** 2).sum())(x)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * float(abs(expected).max()))
    print("done", flush=True)
"""


def test_jitted_functions_of_local_workers_that_call_each_other(mpi_job):
    # All workers call at once.
    mpi_job(
        1,
        on_two_cores(
            NESTED
            + """
def around(k, x):
    return big(jd.rpc_sync((k + 1) % 3, leaf, args=(x,)))

with jd.local_workers(3, timeout=50):
    differentiate()
    x = jnp.ones((300, 300))
    futures = [jd.rpc_async(k, jax.jit(around, static_argnums=0), args=(k, x)) for k in range(3)]
    for future in futures:
        np.testing.assert_allclose(future.result(), big(big(x)), rtol=1e-4)
    print("all done", flush=True)
"""
        ),
    ).expect("done", "all done")


def test_compiled_code_finds_its_context_in_a_world_of_several_devices(mpi_job):
    mpi_job(
        1,
        """
        import jax
        jax.config.update("jax_num_cpu_devices", 8)
        import jax.numpy as jnp, numpy as np
        import jdistgrad as jd

        def same(x): return x
        f1 = jax.jit(jnp.tanh)
        f = jax.jit(lambda x: jd.rpc_sync(0, same, args=(jd.remote(2, f1, args=(x,)),)))
        x = jnp.arange(3.0)
        with jd.local_workers(4), jd.context():
            np.testing.assert_allclose(jd.rpc_sync(2, f, args=(x,)), np.tanh(x), rtol=1e-6)
        print("done", flush=True)
        """,
    ).expect("done")


def test_a_call_that_timed_out_on_a_thread_of_xla_says_so(mpi_job):
    # JAX was started first, so its settings can no longer be changed.
    mpi_job(
        1,
        """
        import jax, jax.numpy as jnp, time
        x = jnp.ones((3072, 3072))
        import jdistgrad as jd

        def slow(x, seconds):
            time.sleep(0 if isinstance(x, jax.core.Tracer) else float(seconds))
            return x + seconds

        with jd.local_workers(2):
            step = jax.jit(lambda x, seconds: jd.rpc_sync(1, slow, args=(x[0, :3], seconds), timeout=2))
            step(x, 0.0)
            try:
                print(step(x @ x / 3072, 3.0), flush=True)  # while it is computed
            except jax.errors.JaxRuntimeError as error:
                print(error, flush=True)
        """,
    ).expect("CallTimeoutError", "held one of XLA's threads", "before the first array")


def test_a_new_world_does_not_inherit_the_error_of_a_compiled_step(mpi_job):
    # While its argument is being copied, a step runs on a thread of XLA; JAX repeats its error in every later step.
    mpi_job(
        3,
        on_two_cores(
            """
            me = jd.init()
            parallel = jd.DataParallel(timeout=30)
            average = jax.jit(parallel.average)
            trees = [{name: np.ones((3000, 3000), np.float32)} for name in ("a", "b")]
            jax.block_until_ready([average(tree) for tree in trees])
            try:
                jax.block_until_ready(average(jax.device_put(trees[me.rank % 2])))
            except jax.errors.JaxRuntimeError as error:
                assert "DisagreementError" in str(error)
            jd.shutdown()

            jd.init()
            found = jax.jit(jd.DataParallel().average)(jnp.full(3, me.rank, float))
            np.testing.assert_array_equal(found, np.ones(3))
            jd.shutdown()
            print("right", flush=True)
            """
        ),
    ).expect("right")
