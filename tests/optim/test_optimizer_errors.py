"""Optimizers that cannot step: they raise, and change nothing on any worker."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers.data import assert_close
from helpers.programs import X, Y, affine, make_params, references
from helpers.training import distributed_loss, values
from helpers.worlds import last, on_worker0

import jdistgrad as jd


@on_worker0
def test_a_value_without_a_gradient_is_named(world):
    refs = references()
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), refs)
    before = refs[0].to_here()
    with jd.context() as ctx:
        jd.grad(lambda p: jd.rpc_sync(0, affine, args=(p, X)).sum())(refs[0])
        with pytest.raises(jd.DifferentiationError, match=r"no gradient of RRef\(.*in this context") as caught:
            optimizer.step(ctx)
    assert caught.value.missing == [str(refs[1])]
    assert_close(refs[0].to_here(), before)  # nothing was changed anywhere


def square_sum(params):
    return jnp.sum(params**2)


def test_an_optimizer_of_another_world_is_refused(world):
    """It does not step with what has the ids of its values in this world."""

    def refused(stale, gradient, ctx):
        for use in (lambda: stale.step(ctx), lambda: stale.step(gradient), stale.state, lambda: stale.restore({})):
            with pytest.raises(jd.StaleReferenceError):
                use()

    def drive(stale):
        rref = jd.remote(last(), jnp.full, args=(3, 2.0, jnp.float32))
        optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [rref])
        with jd.context() as ctx:
            gradient = jd.grad(lambda p: jd.rpc_sync(last(), square_sum, args=(p,)))(rref)
            if stale is not None:
                refused(stale, gradient, ctx)
                assert_close(rref.to_here(), jnp.full(3, 2.0))
            optimizer.step(ctx)
        assert_close(rref.to_here(), jnp.full(3, 1.6))
        return optimizer

    def main():
        optimizer = None
        for _ in range(2):
            if jd.init(timeout=20).rank == 0:
                optimizer = drive(optimizer)
            jd.shutdown()

    world.run(main)


@on_worker0
def test_what_cannot_be_optimized_is_refused(world):
    ref, sgd = jd.RRef(make_params(1)), optax.sgd(0.1)
    module = jd.RemoteModule(last(), functools.partial(nnx.Linear, 3, 2))
    for given in ([make_params(1)], [module], {"a": ref}):
        with pytest.raises(TypeError, match="DistributedOptimizer"):
            jd.DistributedOptimizer(sgd, given)
    for given, norm in (([ref, ref], None), ([ref], 0)):
        with pytest.raises(ValueError):
            jd.DistributedOptimizer(sgd, given, max_global_norm=norm)


@on_worker0
def test_what_no_owner_can_use_is_refused(world):
    refs = references()
    line_search, plain = (jd.DistributedOptimizer(tx, refs) for tx in (optax.lbfgs(), optax.identity()))
    with jd.context() as ctx:
        with pytest.raises(TypeError):
            line_search.step(ctx, value_fn=affine)
        with pytest.raises(TypeError):
            plain.step(ctx, value=0.5)


@pytest.mark.parametrize("value", [jnp.ones(4), jnp.ones(3, jnp.bfloat16), {"w": jnp.ones(3)}])
@on_worker0
def test_a_value_of_another_kind_needs_another_optimizer(big_world, value):
    refs = [jd.put(owner, jnp.ones(3)) for owner in (1, 2)]
    optimizer = jd.DistributedOptimizer(optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(1.0)), refs)
    jd.tree_map(lambda _: value, refs[:1], in_place=True)
    with jd.context() as ctx:
        jd.grad(lambda refs: sum(jd.on(ref.owner, total)(ref) for ref in refs))(refs)
        with pytest.raises(ValueError):
            optimizer.step(ctx)
    assert_close(jd.get(refs[0]), value)


def total(value):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(value))


def second(values):
    return [jax.tree.map(lambda _: False, values[0]), jax.tree.map(lambda leaf: leaf.ndim > 1, values[1])]


@pytest.mark.parametrize(
    "mask", [[{"w": False, "b": False}, {"w": True, "b": False}], second], ids=["list", "function"]
)
@on_worker0
def test_a_mask_is_one_of_the_list_of_values(world, mask):
    refs = references()
    with pytest.raises(ValueError) as caught:
        jd.DistributedOptimizer(optax.masked(optax.sgd(0.1), {"w": True, "b": False}), refs)
    assert "gets a list of the 2 values that are optimized" in "".join(caught.value.__notes__)
    optimizer, before = jd.DistributedOptimizer(optax.masked(optax.sgd(0.1), mask), refs), values(refs)
    with jd.context() as ctx:
        gradients = jd.get(jd.grad(lambda refs: distributed_loss(*refs, X, Y))(refs))
        optimizer.step(ctx)
    first, second = jax.tree.map(jnp.add, before, tuple(gradients))
    assert_close(values(refs), (first, {**second, "w": before[1]["w"] - 0.1 * gradients[1]["w"]}))
