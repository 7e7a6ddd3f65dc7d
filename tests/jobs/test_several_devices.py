"""Jobs whose ranks have two simulated devices each, and average gradients that lie on both."""

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

    def parameters(where):
        w = jnp.linspace(-1, 1, 24).reshape(4, 6)
        specs = {"w": (None, "d"), "v": ("d",), "scale": (), "none": (), "whole": ()} if where == "sharded" else {}
        values = {"w": w, "v": jnp.arange(6.0), "scale": jnp.float32(2), "none": jnp.zeros((0, 3))}
        return {name: put(value, *specs.get(name, ())) for name, value in values.items()}

    def rows(one):
        return jnp.asarray(np.random.default_rng(one).normal(size=(6, 4)).astype("float32"))

    def serial(p):
        own = [jax.value_and_grad(loss)(p, rows(one)) for one in range(ranks)]
        return own[rank][0], jax.tree.map(lambda *gs: sum(gs) / ranks, *[gradients for _, gradients in own])

    def close(found, expected):
        for path, leaf in jax.tree.leaves_with_path(expected):
            got = dict(jax.tree.leaves_with_path(found))[path]
            np.testing.assert_allclose(got, leaf, rtol=2e-5, atol=1e-6, err_msg=str(path))

    plain = {k: jnp.asarray(np.asarray(v)) for k, v in parameters("whole").items()}
"""


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_step_of_ranks_with_two_devices(mpi_job, kind):
    mpi_job(
        3,
        PROGRAM.replace("KIND", kind)
        + """
    def sharded_alike(found, params):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True)
        return all(a.sharding.is_equivalent_to(b.sharding, b.ndim) for a, b in pairs)

    step = {"bucket_cap_mb": 5e-5, "check_finite": True}
    for where, settings in (("whole", {}), ("sharded", step), ("whole", {"hook": jd.hooks.average()})):
        if kind is jax.sharding.AxisType.Explicit and where == "sharded":
            continue  # JAX refuses a product over a sharded axis
        dp, params = jd.DataParallel(devices, **settings), parameters(where)
        x = put(rows(rank), *(("d",) if where == "whole" else ()))
        value, gradients = dp.value_and_grad(loss)(params, x)
        close((value, gradients), serial(plain))
        assert sharded_alike(gradients, params)
        given = jax.tree.map(lambda p: p * (rank + 1), params)
        averaged = dp.average(given)
        close(averaged, {k: v * (ranks + 1) / 2 for k, v in plain.items()})
        assert sharded_alike(averaged, given)
    total = devices.allreduce(put(jnp.arange(4.0), "d") * (rank + 1))
    np.testing.assert_allclose(total, np.arange(4.0) * 6)
    jd.shutdown()
    """,
    ).expect()


def test_ranks_whose_arrays_lie_differently(mpi_job):
    mpi_job(
        3,
        PROGRAM.replace("KIND", "Auto")
        + """
    own = jnp.arange(4.0) + rank
    reversed_ = jax.make_mesh((2,), ("d",), (kind,), devices=jax.local_devices()[::-1])
    backwards = jax.device_put(own, jax.NamedSharding(reversed_, P("d")))
    for hook in (None, jd.hooks.average()):
        dp = jd.DataParallel(devices, check_finite=True, hook=hook)
        np.testing.assert_allclose(dp.average(backwards if rank == 1 else put(own, "d")), np.arange(4.0) + 1)
        params, x = (plain, rows(rank)) if rank == 1 else (parameters("sharded"), put(rows(rank)))
        for _ in range(2):
            close(dp.value_and_grad(loss)(params, x), serial(plain))
    assert dp.mean(put(jnp.float32(rank)) if rank else jnp.float32(0)) == 1
    params["scale"] = params["scale"] * (jnp.nan if rank == 2 else 1)
    try:
        dp.value_and_grad(loss)(params, x)
        print("no error")
    except jd.NonFiniteError as error:
        assert error.rank == 2, error
    jd.shutdown()
    """,
    ).expect("are averaged in host memory")


def test_a_mesh_that_is_set_and_what_a_loss_closes_over(mpi_job):
    mpi_job(
        3,
        PROGRAM.replace("KIND", "Explicit")
        + """
    dp, x = jd.DataParallel(devices), put(rows(rank), "d")
    with jax.set_mesh(mesh):
        close(dp.value_and_grad(loss)(parameters("whole"), x), serial(plain))
        close(dp.average(put(jnp.arange(4.0) * rank, "d")), jnp.arange(4.0))
    close(dp.value_and_grad(lambda p: loss(p, x))(parameters("whole")), serial(plain))
    def normed(p, x):
        return devices.allreduce((p * x).mean())
    try:
        dp.value_and_grad(normed)(put(jnp.ones(2)), put(jnp.ones((4, 2)), "d"))
        print("no error")
    except jd.CollectiveError as error:
        print("named:", error)
    jd.shutdown()
    """,
    ).expect("named: value_and_grad: the loss calls Python, other workers or collectives (SyncBatchNorm, say)")


def test_nan_on_one_device_of_one_rank(mpi_job):
    mpi_job(
        3,
        PROGRAM.replace("KIND", "Auto")
        + """
    dp = jd.DataParallel(devices, check_finite=True)
    bad = jnp.zeros(6).at[5].set(jnp.nan if rank == 2 else 0.0)
    try:
        dp.average({"a": put(jnp.ones(4), "d"), "b": put(bad, "d")})
        print("no error")
    except jd.NonFiniteError as error:
        assert error.rank == 2 and "'b'" in error.path, error
    np.testing.assert_allclose(dp.average(put(jnp.ones(4) * rank, "d")), np.ones(4))
    jd.shutdown()
    """,
    ).expect()


def test_ranks_with_different_numbers_of_devices(mpi_job):
    unequal = '"jax_num_cpu_devices", 2 - (os.environ["OMPI_COMM_WORLD_RANK"] == "1")'
    program = PROGRAM.replace('"jax_num_cpu_devices", 2', unequal).replace("(2,)", "(len(jax.local_devices()),)")
    mpi_job(
        3,
        "\n    import os"
        + program.replace("KIND", "Auto")
        + """
    np.testing.assert_allclose(jd.DataParallel(devices).average(put(jnp.ones(4) * rank, "d")), np.ones(4))
    jd.shutdown()
    """,
    ).expect("are averaged in host memory")


def test_arrays_on_another_device_than_the_rank_s_own_stay_there(mpi_job):
    mpi_job(
        2,
        PROGRAM.replace("KIND", "Auto")
        + """
    other = jax.local_devices()[1]
    dp, (params, x) = jd.DataParallel(devices), jax.device_put((plain, rows(rank)), other)
    value, gradients = dp.value_and_grad(loss)(params, x)
    close((value, gradients), serial(plain))
    averaged = dp.average([params["w"] * rank, plain["w"] * rank])
    close(averaged, [plain["w"] / 2] * 2)
    for leaf in jax.tree.leaves((value, gradients, averaged[0], dp.mean(value), devices.allreduce(x))):
        assert leaf.devices() == {other}, leaf.devices()
    assert averaged[1].devices() == {devices.device}
    jd.shutdown()
    """,
    ).expect()
