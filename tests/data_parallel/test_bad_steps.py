"""Steps that fail on some ranks only, or are not allowed where they are taken: every rank raises, none hangs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.worlds import on_every_worker
from jax.experimental.sparse import BCOO

import jdistgrad as jd
from jdistgrad.collectives import Mesh, of_this_world
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import CollectiveError, DisagreementError, LeafError


@on_every_worker
def test_what_a_rank_that_has_joined_cannot_do(big_world, rank, size):
    dp = DataParallel(timeout=10)
    params = {"w": jnp.ones(3)}

    def steps():
        with dp.join():
            if rank:
                dp.verify(params)

    with pytest.raises(DisagreementError):
        steps()


BAD_GRADIENTS = {
    "longer": (0, jnp.ones(5), r"the gradient of \['w'\] is float32\[5\], expected a JAX array float32\[3\]"),
    "another type": (0, jnp.ones(3, jnp.bfloat16), "is bfloat16"),
    "sparse": (0, BCOO((jnp.ones(3), np.arange(3)[:, None]), shape=(3,)), "is sparse float32"),
    "no array of JAX": (0, np.ones(3, np.float32), "is ndarray"),
    "no such leaf": (1, jnp.ones(3), "there is no leaf 1; this tree has 1"),
}


@pytest.mark.parametrize("what", BAD_GRADIENTS)
@on_every_worker
def test_gradients_of_another_kind_than_announced(world, what, rank, size):
    leaf, gradient, said = BAD_GRADIENTS[what]
    dp = DataParallel()
    reduction = dp.reduction({"w": jnp.ones(3)})
    with pytest.raises(LeafError, match=said):
        reduction.ready(leaf, gradient)
    reduction.ready(0, jnp.full(3, 1.0 + rank))
    np.testing.assert_allclose(reduction.finish()[0], np.full(3, (1 + size) / 2))


@on_every_worker
def test_sparse_and_dense_trees_of_one_shape_have_plans_of_their_own(world, rank, size):
    dp = DataParallel()
    dense, rows = np.eye(3, dtype="float32") * (1 + rank), np.arange(3)[:, None]
    sparse = BCOO((jnp.asarray(dense), jnp.asarray(rows)), shape=(3, 3))
    for leaf in (dense, sparse, dense):
        found = dp.average({"t": leaf})["t"]
        np.testing.assert_allclose(found.data if leaf is sparse else found, np.eye(3) * (1 + size) / 2)


@on_every_worker
def test_indices_of_sparse_arrays_are_not_taken_for_numbers(big_world, rank, size):
    c, dp = of_this_world(), DataParallel()
    x = {"x": BCOO((jnp.ones(size), jnp.arange(size)[:, None]), shape=(size,))}
    for reduce in (c.allreduce, c.allgather, c.gather_rows, c.alltoall, c.reduce_scatter, dp.mean):
        with pytest.raises(LeafError):
            reduce(x)
    np.testing.assert_array_equal(c.broadcast(x)["x"].data, np.ones(size))
    np.testing.assert_array_equal(dp.average(x)["x"].data, np.ones(size))


@on_every_worker
def test_checks_need_steps_called_from_python(world, rank, size):
    step = DataParallel(check_finite=True).value_and_grad(lambda w: (w**2).sum())
    with pytest.raises(CollectiveError):
        jax.jit(step)(jnp.ones(3))


@pytest.mark.parametrize("ask", [lambda dp, tree: dp.verify(tree), lambda dp, tree: dp.reduction(tree)])
def test_what_a_mesh_does_not_need(ask):
    with pytest.raises(CollectiveError):
        ask(DataParallel(Mesh("batch")), {"w": jnp.ones(3)})


def test_what_is_no_group_of_ranks_is_refused():
    with pytest.raises(TypeError):
        jd.average_gradients(optax.adam(1e-3))
    for use in (jd.shard_state, lambda tx, of: jd.gather_state(tx, {}, {}, of)):
        with pytest.raises(TypeError):
            use(optax.adam(1e-3), jd.hooks)
