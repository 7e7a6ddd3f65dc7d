"""Jobs whose ranks have two simulated devices each, and average gradients that both devices hold."""

import pytest

PROGRAM = """
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P
    import jdistgrad as jd

    me = jd.init(devices=True)
    devices = jd.collectives.Devices()
    ranks, rank, kind = devices.size, me.rank, jax.sharding.AxisType.KIND
    mesh = jax.make_mesh((2,), ("d",), (kind,), devices=jax.local_devices())

    def put(x, *spec):
        return jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))

    def loss(p, x):
        return (jnp.tanh(x @ p["w"]) @ p["v"] * p["scale"]).mean() + 0 * p["none"].sum()

    w = jnp.linspace(-1, 1, 24).reshape(4, 6)
    plain = {"w": w, "v": jnp.arange(6.0), "scale": jnp.float32(2), "none": jnp.zeros((0, 3))}
    whole = jax.tree.map(put, plain)

    def rows(one):
        return jnp.asarray(np.random.default_rng(one).normal(size=(6, 4)).astype("float32"))

    def serial(p):
        own = [jax.value_and_grad(loss)(p, rows(one)) for one in range(ranks)]
        return own[rank][0], jax.tree.map(lambda *gs: sum(gs) / ranks, *[gradients for _, gradients in own])

    def close(found, expected):
        for path, leaf in jax.tree.leaves_with_path(expected):
            got = dict(jax.tree.leaves_with_path(found))[path]
            np.testing.assert_allclose(got, leaf, rtol=2e-5, atol=1e-6, err_msg=str(path))
"""


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_step_of_ranks_with_two_devices(mpi_job, kind):
    """The rows of each rank's batch are divided over its devices; rank 1 computes on one of them."""
    mpi_job(
        3,
        PROGRAM.replace("KIND", kind)
        + """
    for settings in ({"bucket_cap_mb": 5e-5, "check_finite": True}, {"hook": jd.hooks.average()}):
        dp = jd.DataParallel(devices, **settings)
        step, given = dp.value_and_grad(loss), jax.tree.map(lambda p: p * (rank + 1), whole)
        close(step(whole, put(rows(rank), "d")), serial(plain))
        close(step(plain, rows(rank)) if rank == 1 else step(whole, put(rows(rank), "d")), serial(plain))
        averaged = dp.average(given)
        close(averaged, {k: v * (ranks + 1) / 2 for k, v in plain.items()})
        for a, b in zip(jax.tree.leaves(averaged), jax.tree.leaves(given), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
    with jax.set_mesh(mesh):
        close(dp.value_and_grad(loss)(whole, put(rows(rank), "d")), serial(plain))
    x = put(rows(rank), "d")
    close(dp.value_and_grad(lambda p: loss(p, x))(whole), serial(plain))
    np.testing.assert_allclose(devices.allreduce(put(jnp.arange(4.0)) * (rank + 1)), np.arange(4.0) * 6)
    jd.shutdown()
    """,
    ).expect()


def test_what_is_refused_or_not_finite(mpi_job):
    mpi_job(
        3,
        PROGRAM.replace("KIND", "Explicit")
        + """
    dp, other = jd.DataParallel(devices, check_finite=True), jax.local_devices()[1]
    def normed(p, x):
        return devices.allreduce((p * x).mean())
    for use, said in (
        (lambda: jd.DataParallel(devices).average(put(jnp.arange(4.0), "d")), "Use jax.device_put"),
        (lambda: jd.DataParallel(devices).average(jax.device_put(jnp.ones(4), other)), "Use jax.device_put"),
        (lambda: devices.jit(jnp.sum)(put(jnp.arange(4.0), "d")), "Use jax.device_put"),
        (lambda: jd.DataParallel(devices).value_and_grad(normed)(put(jnp.ones(2)), put(jnp.ones((4, 2)), "d")),
         "the loss calls Python, other workers or collectives (SyncBatchNorm, say)"),
    ):
        try:
            use()
            print("no error")
        except (jd.CollectiveError, jd.LeafError) as error:
            assert said in str(error), error
    bad = jnp.zeros(6).at[5].set(jnp.nan if rank == 2 else 0.0)
    try:
        dp.average({"a": put(jnp.ones(4)), "b": put(bad)})
        print("no error")
    except jd.NonFiniteError as error:
        assert error.rank == 2 and "'b'" in error.path, error
    np.testing.assert_allclose(dp.average(put(jnp.ones(4)) * rank), np.ones(4))
    print("done")
    jd.shutdown()
    """,
    ).expect("done")


def test_ranks_with_different_numbers_of_devices(mpi_job):
    unequal = '"jax_num_cpu_devices", 2 - (os.environ["OMPI_COMM_WORLD_RANK"] == "1")'
    program = PROGRAM.replace('"jax_num_cpu_devices", 2', unequal).replace("(2,)", "(len(jax.local_devices()),)")
    mpi_job(
        3,
        "\n    import os"
        + program.replace("KIND", "Auto").replace("jax.tree.map(put, plain)", "plain")
        + """
    mine = jnp.ones(4) * rank
    np.testing.assert_allclose(jd.DataParallel(devices).average(mine if rank == 1 else put(mine)), np.ones(4))
    jd.shutdown()
    """,
    ).expect()
