"""Data parallelism along an axis of a simulated mesh of eight devices: steps, collectives and hooks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.models import batch, loss, net_inputs, net_loss, net_serially, parameters, serial
from jax.sharding import PartitionSpec as P

from jdistgrad.collectives import Mesh
from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.batch_norm import SyncBatchNorm
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import CollectiveError, HookError
from jdistgrad.optim.averaging import average_gradients
from jdistgrad.optim.sharding import shard_state

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices: the local run has them, simulated")
RANKS = 8


def on_mesh(f, *args, in_specs, out_specs, typed=False):
    mesh = jax.make_mesh((RANKS,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=typed)
    return jax.jit(mapped)(*args)


def everybodys(n=RANKS):
    return jnp.concatenate([batch(r) for r in range(n)])


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(("hook", "tolerance"), [(None, 1e-5), (hooks.float16(), 2e-3)], ids=["none", "float16"])
def test_gradients_are_those_of_the_whole_batch(typed, hook, tolerance):
    dp = DataParallel(Mesh("batch"), bucket_cap_mb=1e-4, hook=hook)

    def step(params, x):
        own = jax.tree.map(lambda p: p + dp.collectives.rank.astype(p.dtype), params)
        params = dp.broadcast(own)
        value, gradients = dp.value_and_grad(loss)(params, x)
        return jax.lax.pmean(value, "batch"), gradients

    got = on_mesh(step, parameters(), everybodys(), in_specs=(P(), P("batch")), out_specs=P(), typed=typed)
    assert_close(got, serial(loss, parameters(), [batch(r) for r in range(RANKS)]), tolerance)


def test_flax_with_batch_norm_and_dropout():
    variables, expected_loss, expected_stats, expected = net_serially(RANKS)
    dp = DataParallel(Mesh("batch"))
    loss = functools.partial(net_loss, functools.partial(SyncBatchNorm, dp.collectives))

    def step(params, stats, x, rows):
        (value, new), gradients = dp.value_and_grad(loss, has_aux=True)(params, stats, x, rows)
        return jax.lax.pmean(value, "batch"), new, gradients

    x, rows = (np.concatenate(parts) for parts in zip(*map(net_inputs, range(RANKS)), strict=True))
    specs = (P(), P(), P("batch"), P("batch"))
    value, stats, gradients = on_mesh(
        step, variables["params"], variables["batch_stats"], x, rows, in_specs=specs, out_specs=P(), typed=True
    )
    assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
    assert_close(stats, expected_stats, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(value, expected_loss, rtol=1e-5)


@pytest.mark.parametrize("typed", [True, False])
def test_average_gradients(typed):
    # With types, JAX has already summed the gradients of replicated parameters: they must not be summed again.
    tx = optax.chain(average_gradients(Mesh("batch"), bucket_cap_mb=1e-4), optax.sgd(0.1))

    def step(params, x):
        updates, _ = tx.update(jax.grad(loss)(params, x), tx.init(params), params)
        return optax.apply_updates(params, updates)

    got = on_mesh(step, parameters(), everybodys(), in_specs=(P(), P("batch")), out_specs=P(), typed=typed)
    _, gradients = serial(loss, parameters(), [batch(r) for r in range(RANKS)])
    assert_close(got, jax.tree.map(lambda p, g: p - (0.1 * g).astype(p.dtype), parameters(), gradients))


def test_sharded_optimizer_state():
    tx = shard_state(optax.adam(0.1), Mesh("batch"))

    def steps(params):
        state = tx.init(params)
        for k in range(3):
            updates, state = tx.update(jax.tree.map(lambda p, k=k: p * (k + 1), params), state, params)
            params = optax.apply_updates(params, updates)
        return params, jax.tree.map(lambda leaf: leaf.reshape(-1), state)

    got, state = on_mesh(steps, floats(), in_specs=P(), out_specs=(P(), P(None)))
    plain, params = optax.adam(0.1), floats()
    whole = plain.init(params)
    for k in range(3):
        updates, whole = plain.update(jax.tree.map(lambda p, k=k: p * (k + 1), params), whole, params)
        params = optax.apply_updates(params, updates)
    assert_close(got, params)
    assert jax.tree.map(jnp.size, state[0].mu) == jax.tree.map(lambda p: -(-p.size // RANKS), params)


def floats():
    return {"w": jnp.arange(15.0).reshape(5, 3) / 10, "b": -jnp.arange(1.0, 5.0)}


ODD = ["uint2", "int4", "float4_e2m1fn", "float8_e8m0fnu"]


def test_numbers_that_xla_packs_and_such_without_a_zero():
    numbers = 1 + np.arange(RANKS * 6).reshape(RANKS, 2, 3) % 2

    def body(tree):
        c, x = Mesh("batch"), jax.tree.map(lambda leaf: leaf[0], tree)
        return c.broadcast(x, 3), c.allgather(x), c.shift(x), c.allreduce(x, "max")

    out, xs = (P(), P("batch"), P("batch"), P()), {dtype: jnp.asarray(numbers, dtype) for dtype in ODD}
    expected = numbers[3], np.tile(numbers, (RANKS, 1, 1)), np.roll(numbers, 1, 0).reshape(-1, 3), numbers.max(0)
    for found, wide in zip(on_mesh(body, xs, in_specs=P("batch"), out_specs=out), expected, strict=True):
        for dtype, one in found.items():
            assert one.dtype == dtype
            np.testing.assert_array_equal(np.asarray(one, np.float32), wide)


@pytest.mark.parametrize("typed", [True, False])
def test_derivatives_of_the_other_operations(typed):
    # Derivatives are those of the sum of all ranks' losses; equal maxima share the derivative.
    xs = jnp.array([1.0, 5.0, 2.0, 5.0, 1.0, 3.0, 4.0, 1.0])
    whole = {
        "sum": jnp.sum,
        "max": jnp.max,
        "min": jnp.min,
        "broadcast": lambda x: x[3],
        "gather": lambda x: x @ jnp.arange(8.0),
    }

    def derivatives(x):
        c = Mesh("batch")
        operations = {
            "sum": c.allreduce,
            "max": lambda x: c.allreduce(x, "max"),
            "min": lambda x: c.allreduce(x, "min"),
            "broadcast": lambda x: c.broadcast(x, 3),
            "gather": lambda x: jnp.arange(8.0) @ c.allgather(x),
        }
        return {
            name: jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x)) * (c.rank + 1)))(x) for name, f in operations.items()
        }

    found = on_mesh(derivatives, xs, in_specs=P("batch"), out_specs=P("batch"), typed=typed)
    for name, f in whole.items():
        expected = jax.grad(lambda xs, f=f: sum(jnp.sin(f(xs)) * (r + 1) for r in range(RANKS)))(xs)
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5)


def test_derivatives_of_what_is_the_same_on_all_ranks():
    operations = "sum", "mean", "max", "min"

    def totals(x):
        def found(x):
            return [Mesh("batch").allreduce(x, op) for op in operations]

        return [jnp.sum(jnp.sin(one)) for one in on_mesh(found, x, in_specs=P(), out_specs=P(), typed=True)]

    x = jnp.arange(1.0, 4.0)
    for op, found in zip(operations, jax.jacrev(totals)(x), strict=True):
        expected = jax.grad(lambda x, op=op: jnp.sum(jnp.sin(RANKS * x if op == "sum" else x)))(x)
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def multiplied(x):
    return Mesh("batch").allreduce(x, "prod")


@pytest.mark.parametrize("typed", [True, False])
def test_products_of_numbers_that_xla_packs_and_such_without_a_zero(typed):
    xs = {dtype: jnp.asarray([1, 1, 2, 1, 1, 1, 1, 1], dtype) for dtype in ODD}
    for dtype, product in on_mesh(multiplied, xs, in_specs=P("batch"), out_specs=P(), typed=typed).items():
        assert product.dtype == dtype
        assert float(product[0]) == 2


def test_a_product_is_typed_as_the_same_on_all_ranks():
    xs = jnp.array([1.0, -2.0, 0.5, 3.0, 1.0, -1.0, 2.0, 1.5])

    def product(xs):
        return jnp.sum(jnp.sin(on_mesh(multiplied, xs, in_specs=P("batch"), out_specs=P(), typed=True)))

    np.testing.assert_allclose(product(xs), jnp.sin(jnp.prod(xs)), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(product)(xs), jax.grad(lambda xs: jnp.sin(jnp.prod(xs)))(xs), rtol=1e-4)


def test_a_hook_that_would_be_skipped_is_refused():
    tx = average_gradients(Mesh("batch"), hook=hooks.bfloat16())

    def step(params, x):
        return tx.update(jax.grad(loss)(params, x), tx.init(params))[0]

    with pytest.raises(HookError, match=r"the hook 'bfloat16' comes too late: JAX has summed the gradient of .*pcast"):
        on_mesh(step, parameters(), everybodys(), in_specs=(P(), P("batch")), out_specs=P(), typed=True)


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("hook", [hooks.powersgd(rank=4, start=1, min_rate=1e-3), hooks.int8(block=4)], ids=["p", "i"])
def test_hooks_with_states_live_in_the_optimizers_state(hook, typed):
    tx = average_gradients(Mesh("batch"), hook=hook)
    gradient = {"w": jnp.arange(24.0).reshape(6, 4) % 5, "b": jnp.ones(4)}

    def steps(x):
        state, lost = tx.init(gradient), 0.0
        for _ in range(20):
            averaged, state = tx.update(jax.tree.map(functools.partial(jnp.multiply, x[0]), gradient), state)
            lost += averaged["w"]
        return lost / 20

    got = on_mesh(steps, jnp.arange(1.0, 9.0), in_specs=P("batch"), out_specs=P(), typed=typed)
    np.testing.assert_allclose(got, gradient["w"] * 4.5, rtol=1e-4, atol=2e-2)


@pytest.mark.parametrize("typed", [True, False])
def test_rows_and_blocks_along_an_axis(typed):
    c = Mesh("batch")
    x = np.arange(RANKS * RANKS * 2, dtype=np.float32).reshape(RANKS * RANKS, 2)

    def run(x):
        exchanged = c.alltoall({"x": x})["x"]
        first, last = c.shift(x), c.shift(x, -1, wrap=False)
        return exchanged, c.alltoall(exchanged) - x, c.reduce_scatter(x), first, last, c.allreduce(x, "mean")

    out = (*[P("batch")] * 5, P())
    exchanged, back, scattered, first, last, mean = on_mesh(run, x, in_specs=P("batch"), out_specs=out, typed=typed)
    blocks = x.reshape(RANKS, RANKS, 2)
    np.testing.assert_array_equal(exchanged, blocks.swapaxes(0, 1).reshape(x.shape))
    assert not back.any()
    np.testing.assert_array_equal(scattered, blocks.sum(0))
    np.testing.assert_array_equal(first.reshape(blocks.shape), np.roll(blocks, 1, axis=0))
    np.testing.assert_array_equal(last.reshape(blocks.shape), np.concatenate([blocks[1:], 0 * blocks[:1]]))
    np.testing.assert_allclose(mean, blocks.mean(0))


def test_derivatives_of_blocks_along_an_axis():
    c = Mesh("batch")
    x = np.random.default_rng(0).normal(size=(RANKS * RANKS, 2)).astype(np.float32)
    weights = np.random.default_rng(1).normal(size=(RANKS * RANKS, 2)).astype(np.float32)

    def along(x, w):
        loss = lambda x: jnp.sum(jnp.sin(c.alltoall(c.shift(x, 3))) * w)  # noqa: E731
        return jax.grad(loss)(x)

    def serial_loss(x):
        shifted = jnp.roll(x.reshape(RANKS, RANKS, 2), 3, axis=0)
        return jnp.sum(jnp.sin(shifted.swapaxes(0, 1).reshape(x.shape)) * weights)

    found = on_mesh(along, x, weights, in_specs=(P("batch"), P("batch")), out_specs=P("batch"))
    np.testing.assert_allclose(found, jax.grad(serial_loss)(x), rtol=1e-5, atol=1e-6)


def test_splits_on_a_mesh_are_refused():
    with pytest.raises(CollectiveError):
        on_mesh(
            lambda x: Mesh("batch").alltoall(x, np.ones((8, 8), int)),
            jnp.ones(64),
            in_specs=P("batch"),
            out_specs=P("batch"),
        )


def test_a_compiled_step_holds_a_rank_s_part_of_the_gradients_and_few_buckets():
    layers, width = 12, 256
    params = {f"layer{k}": jnp.zeros((width, width)) for k in range(layers)}
    one, whole = 4 * width**2, 4 * width**2 * layers
    tx = shard_state(optax.adam(1e-3), Mesh("batch"), average=True, bucket_cap_mb=one / 2**20)

    def train(params, x):
        def deep(params):
            return functools.reduce(lambda x, w: jnp.tanh(x @ w), jax.tree.leaves(params), x).mean()

        updates, state = tx.update(jax.grad(deep)(params), tx.init(params), params)
        return optax.apply_updates(params, updates), jax.tree.map(jnp.atleast_1d, state)

    mesh = jax.make_mesh((RANKS,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(train, mesh=mesh, in_specs=P(), out_specs=(P(), P("batch")), check_vma=False)
    compiled = jax.jit(mapped, donate_argnums=0).lower(params, jnp.ones((2, width))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < whole / RANKS + 5 * one


@pytest.mark.parametrize("typed", [True, False])
def test_the_blocks_of_empty_arrays_are_empty(typed):
    def scattered(xs):
        return [Mesh("batch").reduce_scatter(x[0])[None] for x in xs]

    xs = [jnp.zeros((RANKS, *shape)) for shape in ((0, 3), (RANKS, 0))]
    found = on_mesh(scattered, xs, in_specs=P("batch"), out_specs=P("batch"), typed=typed)
    assert [one.shape for one in found] == [(RANKS, 0, 3), (RANKS, 1, 0)]
