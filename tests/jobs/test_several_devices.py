"""Jobs whose ranks have two simulated devices each, and average gradients that both devices hold."""

PROGRAM = """
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P
    import jdistgrad as jd

    me = jd.init(devices=True)
    devices = jd.collectives.Devices()
    ranks, rank, kinds = devices.size, me.rank, jax.sharding.AxisType

    def mesh_of(kind):
        return jax.make_mesh((len(jax.local_devices()),), ("d",), (kind,), devices=jax.local_devices())

    mesh = mesh_of(kinds.Auto)

    def put(x, *spec):
        return jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))

    def loss(p, x):
        return (jnp.tanh(x @ p["w"]) @ p["v"] * p["scale"]).mean() + 0 * p["none"].sum()

    w = jnp.linspace(-1, 1, 24).reshape(4, 6)
    plain = {"w": w, "v": jnp.arange(6.0), "scale": jnp.float32(2), "none": jnp.zeros((0, 3))}

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


def test_a_step_of_ranks_with_two_devices(mpi_job):
    """The rows of each rank's batch are divided over its devices; rank 1 computes on one of them."""
    mpi_job(
        3,
        PROGRAM
        + """
    for kind in (kinds.Auto, kinds.Explicit):
        mesh = mesh_of(kind)
        whole, x = jax.tree.map(put, plain), put(rows(rank), "d")
        given = jax.tree.map(lambda p: p * (rank + 1), whole)
        for settings in ({"bucket_cap_mb": 5e-5, "check_finite": True}, {"hook": jd.hooks.average()}):
            dp = jd.DataParallel(devices, **settings)
            step = dp.value_and_grad(loss)
            close(step(whole, x), serial(plain))
            close(step(plain, rows(rank)) if rank == 1 else step(whole, x), serial(plain))
            averaged = dp.average(given)
            close(averaged, {k: v * (ranks + 1) / 2 for k, v in plain.items()})
            for a, b in zip(jax.tree.leaves(averaged), jax.tree.leaves(given), strict=True):
                assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
        with jax.set_mesh(mesh):
            close(dp.value_and_grad(loss)(whole, x), serial(plain))
        close(dp.value_and_grad(lambda p: loss(p, x))(whole), serial(plain))
        np.testing.assert_allclose(devices.allreduce(put(jnp.arange(4.0)) * (rank + 1)), np.arange(4.0) * 6)

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
    program = PROGRAM.replace('"jax_num_cpu_devices", 2', unequal)
    mpi_job(
        3,
        "\n    import os"
        + program
        + """
    mine = jnp.ones(4) * rank
    np.testing.assert_allclose(jd.DataParallel(devices).average(mine if rank == 1 else put(mine)), np.ones(4))
    jd.shutdown()
    """,
    ).expect()
