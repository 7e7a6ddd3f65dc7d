"""Jobs whose processes have two simulated devices each: where values lie, and functions sharded over a worker's own."""

PROGRAM = """
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import PartitionSpec as P
    import jdistgrad as jd

    def devices_of(x):
        return sorted(device.id for device in x.devices())

    def product(x, w):
        return jnp.tanh(x @ w)

    def places(*arrays):
        return [devices_of(x) for x in arrays] == [[jax.local_devices()[0].id]] * len(arrays)

    def mesh():
        return jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def spread():
        return jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh(), P("d")))

    def by_jit(x):
        return jnp.sin(jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh(), P("d")))) * x

    def by_shard_map(x):
        def local(x):
            return jnp.sin(x) * jax.lax.psum(x.sum(), "d")
        return jax.shard_map(local, mesh=mesh(), in_specs=P("d"), out_specs=P("d"))(x)

    def serial(which, x):
        return (jnp.sin(x) * (x if which is by_jit else x.sum())).sum()

    me = jd.init()
"""


def test_values_lie_on_the_worker_s_device_or_as_its_functions_shard_them(mpi_job):
    mpi_job(
        3,
        PROGRAM
        + """
    if me.rank == 0:
        first, second = jax.local_devices()
        x, w = (jax.device_put(jnp.ones(shape), second) for shape in ((2, 3), (3, 4)))
        expected = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
        ref = jd.remote(2, jnp.ones, args=((3, 4),))
        def loss(w):
            return jd.rpc_sync(1, product, args=(x, w)).sum()
        assert jd.rpc_sync(1, places, args=(x, w, ref))
        with jd.context() as ctx:
            found = {
                "a call": jd.rpc_sync(1, product, args=(x, w)),
                "a gradient": jax.grad(loss)(w),
                "a value": ref.to_here(),
                "a staged gradient": jd.jit(jd.grad(loss))(w),
            }
        for what, value in found.items():
            assert devices_of(value) == [first.id], (what, value.devices())
            w - value.sum()  # arrays that nobody has put anywhere go along with others
        for what in ("a gradient", "a staged gradient"):
            np.testing.assert_allclose(found[what], expected, rtol=1e-6)
            np.testing.assert_allclose(w - 0.1 * found[what], w - 0.1 * expected, rtol=1e-6)
        del ref

        # functions that are sharded over a worker's devices
        x = jnp.arange(8.0)
        for which in (by_jit, by_shard_map):
            ref, optimizer = jd.remote(1, spread), None
            def loss(value):
                return jd.rpc_sync(1, which, args=(value,)).sum()
            expected = jax.grad(lambda x: serial(which, x))(x)
            with jd.context():
                np.testing.assert_allclose(jax.grad(loss)(x), expected, rtol=1e-5)
            np.testing.assert_allclose(jd.jit(jd.grad(loss))(x), expected, rtol=1e-5)
            optimizer = jd.DistributedOptimizer(optax.sgd(0.1, momentum=0.9), [ref])
            with jd.context() as ctx:
                jd.backward(ctx, loss, ref)
                optimizer.step(ctx)
            after = x - 0.1 * expected
            np.testing.assert_allclose(ref.to_here(), after, rtol=1e-5)
            _, gradients = jd.jit(jd.value_and_grad(loss))(ref)
            optimizer.step(gradients)
            assert len(jd.rpc_sync(1, devices_of, args=(ref,))) == 2
            again = jax.grad(lambda x: serial(which, x))(after)
            np.testing.assert_allclose(ref.to_here(), after - 0.1 * (again + 0.9 * expected), rtol=1e-4)
            del ref, optimizer, gradients
    jd.shutdown()
    """,
    ).expect()
