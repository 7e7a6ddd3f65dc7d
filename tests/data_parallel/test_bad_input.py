"""Bad input: a clear error on every rank, and nothing is reduced or lost."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import batch, loss, parameters
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.collectives import Mesh
from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import (
    CollectiveError,
    DisagreementError,
    HookError,
    LeafError,
    MissingRanksError,
    NonFiniteError,
)


def tree(**leaves):
    return {"a": jnp.ones(3), **leaves}


DIFFERENT = {
    "shape": (tree(w=jnp.ones((2, 3))), r"the leaf \['w'\] is float32\[4\] on rank 0, float32\[2, 3\] on rank 1"),
    "dtype": (
        tree(w=jnp.ones(4, jnp.bfloat16)),
        r"the leaf \['w'\] is float32\[4\] on rank 0, bfloat16\[4\] on rank 1",
    ),
    "tree": (tree(v=jnp.ones(4)), r"leaf \['w'\] of rank 0 stands where rank 1 has \['v'\]"),
    "count": (
        tree(w=jnp.ones(4), x=jnp.ones(1)),
        r"rank 1 has the leaf \['x'\] \(float32\[1\]\), rank 0 has none there",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
@on_every_worker
def test_ranks_that_disagree_are_told_before_anything_is_reduced(big_world, what, rank, size):
    theirs, said = DIFFERENT[what]
    dp, ours = DataParallel(), tree(w=jnp.ones(4))
    mine = theirs if rank == 1 else ours
    with pytest.raises(DisagreementError, match=said) as caught:
        dp.average(mine)
    assert caught.value.rank == 1
    np.testing.assert_array_equal(mine["a"], np.ones(3))
    np.testing.assert_allclose(dp.average(ours)["w"], np.ones(4), rtol=1e-6)  # and it still works
    with pytest.raises(DisagreementError, match=said):  # a rank averages another tree in a later step
        dp.average(mine)
    with pytest.raises(DisagreementError, match=said):
        dp.broadcast(mine)
    with pytest.raises(DisagreementError, match=said):
        dp.verify(mine)
    np.testing.assert_allclose(dp.average(ours)["w"], np.ones(4), rtol=1e-6)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["rate", "note"])
@dataclasses.dataclass(frozen=True)
class Layer:
    w: jax.Array
    rate: float = 0.5
    note: object = None


def layer_loss(layer):
    return (layer.w * layer.rate).sum()


@on_every_worker
def test_ranks_whose_modules_have_other_static_parts_are_told(big_world, rank, size):
    dp, said = DataParallel(), r"a static part of the tree is Layer: \(0.5, None\) on rank 0, Layer: \(0.25, None\)"
    ours = Layer(jnp.ones(3))
    mine = dataclasses.replace(ours, rate=0.25) if rank == 2 else ours
    for use in (dp.average, dp.verify, dp.broadcast, dp.value_and_grad(layer_loss), jax.jit(dp.average)):
        with pytest.raises(Exception, match=said):
            use(mine)
    assert dp.value_and_grad(layer_loss)(ours)[1].w.tolist() == [0.5] * 3


def first_row(reference, x):
    return jnp.sum(reference.to_here()["w"] * x)


@on_every_worker
def test_references_are_not_averaged_as_the_numbers_that_stand_for_them(world, rank, size):
    dp, reference, x = DataParallel(), jd.RRef({"w": jnp.ones(3)}), jnp.arange(3.0)
    with jd.context():
        gradient = jd.value_and_grad(first_row)(reference, x)[1]
        for tree in ({"t": reference, "x": x}, {"t": gradient, "x": x}):
            for use in (dp.average, dp.broadcast, dp.mean, dp.verify, jax.jit(dp.average)):
                with pytest.raises(LeafError):
                    use(tree)
        for argnums in (0, (1, 0)):
            with pytest.raises(LeafError):
                dp.value_and_grad(first_row, argnums)(reference, x)
        np.testing.assert_array_equal(dp.value_and_grad(first_row, 1)(reference, x)[1], np.ones(3))
    np.testing.assert_array_equal(dp.average(x), x)


@on_every_worker
def test_a_step_taken_by_some_ranks_only(big_world, rank, size):
    dp, done = DataParallel(timeout=0.5), DataParallel()
    dp.average(tree())
    if rank == 1:
        time.sleep(2)
    else:
        said = rf"rank {rank} reduces bucket 0 of given gradients in step 2: rank 1 has not come within 0\.5 s"
        with pytest.raises(MissingRanksError, match=said) as caught:
            dp.average(tree())
        assert caught.value.missing == [1]
        with pytest.raises(MissingRanksError):
            dp.average(tree())
    done.average(tree())


def returning(value, name="mine"):
    return hooks.Hook(lambda bucket: (), lambda bucket, state, collectives: (value(bucket.flat), state), name)


@pytest.mark.parametrize(
    ("hook", "got"),
    [
        (returning(lambda flat: flat[1:]), r"float32\[2\]"),
        (returning(lambda flat: flat.astype(jnp.bfloat16)), r"bfloat16\[3\]"),
        (returning(lambda flat: None), "None"),
        (hooks.Hook(lambda bucket: (), lambda bucket, state, collectives: bucket.flat, "mine"), "alone"),
    ],
)
@on_every_worker
def test_a_hook_that_returns_something_else(big_world, hook, got, rank, size):
    said = rf"the hook 'mine' returned .*{got}.* for bucket 0, expected \(a JAX array float32\[3\], the new state\)"
    with pytest.raises(HookError, match=said):
        DataParallel(hook=hook).average(tree())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@on_every_worker
def test_numbers_that_are_not_finite_are_found(big_world, bad, rank, size):
    dp = DataParallel(check_finite=True, bucket_cap_mb=1e-5)
    mine = tree(w=jnp.ones(4).at[2].set(bad) if rank == 2 else jnp.ones(4))
    with pytest.raises(NonFiniteError, match=r"the gradient of \['w'\] on rank 2 holds NaN or infinity") as caught:
        dp.average(mine)
    assert (caught.value.rank, caught.value.path) == (2, "['w']")
    np.testing.assert_allclose(dp.average(tree(w=jnp.ones(4)))["w"], np.ones(4), rtol=1e-6)


@pytest.mark.parametrize("hook", [hooks.int8(), hooks.powersgd(rank=1, start=0)], ids=["int8", "powersgd"])
@on_every_worker
def test_a_hook_forgets_the_step_whose_numbers_are_not_finite(big_world, hook, rank, size):
    draw = np.random.default_rng(rank)
    good, others = ({name: draw.normal(size=(16, 16)).astype("float32") for name in "abc"} for _ in range(2))
    bad = others["b"].copy()
    bad[3, 4] = np.nan
    careful, alone = (DataParallel(hook=hook, check_finite=True, bucket_cap_mb=1e-5) for _ in range(2))
    for name in "ac":
        with pytest.raises(NonFiniteError):
            careful.average({**others, name: bad})
        jax.tree.map(np.testing.assert_array_equal, careful.average(good), alone.average(good))


@on_every_worker
def test_integer_parameters_are_refused(world, rank, size):
    dp = DataParallel()
    said = r"the leaf \['n'\] is int32\[2\], expected a floating or complex dtype"
    with pytest.raises(LeafError, match="value_and_grad: " + said):
        dp.value_and_grad(lambda p: p["a"].sum())({"a": jnp.ones(2), "n": jnp.ones(2, jnp.int32)})
    with pytest.raises(LeafError, match=said):
        dp.average({"a": jnp.ones(2), "n": jnp.ones(2, jnp.int32)})


@on_every_worker
def test_gradients_marked_twice_or_never(world, rank, size):
    dp = DataParallel()
    reduction = dp.reduction(tree(b=jnp.ones(2)))
    reduction.ready(1, jnp.ones(2) + 0)
    with pytest.raises(LeafError):
        reduction.ready(1, jnp.ones(2))
    with pytest.raises(LeafError):
        reduction.finish()


@on_every_worker
def test_parameters_that_have_drifted_are_found(big_world, rank, size):
    dp = DataParallel()
    params = tree(w=jnp.zeros((2, 3)).at[1, 2].set(5.0 if rank == 2 else 4.0))
    with pytest.raises(DisagreementError, match=r"\['w'\]\[1, 2\] is 4.0 on rank 0, 5.0 on rank 2") as caught:
        dp.verify(params)
    assert (caught.value.rank, caught.value.path) == (2, "['w']")
    dp.verify(dp.broadcast(params, root=2))


@on_every_worker
def test_an_exception_in_a_joined_block_passes_through(world, rank, size):
    dp = DataParallel()
    with pytest.raises(ZeroDivisionError), dp.join():
        raise ZeroDivisionError("mine")
    with dp.join() as join:
        join.finish(tree())
        with pytest.raises(CollectiveError):
            join.finish(tree())


@on_every_worker
def test_a_hook_with_a_state_inside_jit(world, rank, size):
    dp = DataParallel(hook=hooks.int8())
    with pytest.raises(HookError):
        jax.jit(dp.value_and_grad(loss))(parameters(), batch(rank))


@on_every_worker
def test_leaves_that_are_no_numbers(world, rank, size):
    dp = DataParallel()
    for ask in (dp.average, dp.broadcast, dp.verify):
        with pytest.raises(LeafError):
            ask({"name": "a text"})
    with pytest.raises(ValueError, match="the root must be a rank from 0 to"):
        dp.broadcast(tree(), root=0.5)


@on_every_worker
def test_arguments_that_cannot_be_differentiated(world, rank, size):
    with pytest.raises(TypeError):
        DataParallel().value_and_grad(loss)(params=parameters())
    step = DataParallel().value_and_grad(lambda x, w: (x * w).sum(), argnums=np.int64(1))
    np.testing.assert_array_equal(step(jnp.arange(3.0), jnp.ones(3))[1], np.arange(3))


def test_a_mesh_outside_shard_map():
    with pytest.raises(CollectiveError):
        DataParallel(Mesh("batch")).average(tree())
    with pytest.raises(CollectiveError), DataParallel(Mesh("x")).join():
        pass


SETTINGS = [
    lambda: DataParallel(hook="powersgd"),
    lambda: DataParallel(hook=hooks.powersgd),
    lambda: DataParallel(Mesh("batch"), sparse="['w']"),
    lambda: DataParallel(Mesh("batch"), timeout=0),
    lambda: DataParallel(Mesh("batch"), bucket_cap_mb=float("nan")),
    lambda: DataParallel("world"),
    lambda: hooks.powersgd(rank=0),
    lambda: hooks.int8(block=0),
    lambda: hooks.average(0),
]


@pytest.mark.parametrize("make", SETTINGS)
def test_settings_that_are_none(make):
    with pytest.raises((HookError, TypeError, ValueError)):
        make()
