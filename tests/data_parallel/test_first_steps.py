"""The first step of a DataParallel compares the parameters of the ranks, which would train apart for ever."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.models import batch, loss, parameters, serial
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.data_parallel.agreement import digest_of


@on_every_worker
def test_ranks_with_other_parameters_are_named(big_world, rank, size):
    dp = jd.DataParallel()
    step, params = dp.value_and_grad(loss), parameters()
    last = jax.tree_util.tree_flatten_with_path(params)[0][-1][0]
    mine = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf + (rank > 0) if path == last else leaf, params)
    with pytest.raises(jd.DisagreementError, match=r"dp\.broadcast\(params\), before the first step") as caught:
        step(mine, batch(rank))
    assert caught.value.path == jax.tree_util.keystr(last)
    others = ", ".join(map(str, range(1, size)))
    assert f"{caught.value.path} of rank {others} is not that of rank 0" in str(caught.value)
    params = dp.broadcast(mine)  # as it says
    _, gradients = step(params, batch(rank))
    assert_close(gradients, serial(loss, parameters(), [batch(r) for r in range(size)])[1])


@on_every_worker
def test_parameters_that_are_to_differ(big_world, rank, size):
    dp = jd.DataParallel(check_parameters=False)
    _, gradient = dp.value_and_grad(jnp.square)(jnp.float32(rank + 1))
    assert_close(gradient, np.float32(size + 1))


@on_every_worker
def test_several_arguments_and_numbers_are_compared(big_world, rank, size):
    def product(x, y, z):
        return x * jnp.sum(y) * z

    step = jd.DataParallel().value_and_grad(product, (2, 1))
    step(float(rank), jnp.ones(3), 2.0)
    with pytest.raises(jd.DisagreementError):
        jd.DataParallel().value_and_grad(product, (2, 1))(1.0, jnp.ones(3), float(rank == 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [0, 1, 3, 7, 64, 1000, 4096])
def test_digests_of_arrays_differ_in_any_element_and_in_their_order(dtype, size):
    array = np.asarray(jnp.asarray(np.random.default_rng(size).normal(size=size)).astype(dtype))
    same = array.copy()
    assert digest_of(array) == digest_of(same) == digest_of(array.reshape(-1, 1))
    for k in {0, size // 2, size - 1} if size else ():
        other = array.copy()
        other[k] = np.nextafter(np.float32(other[k]), np.float32(9)).astype(other.dtype) + other.dtype.type(0.125)
        assert digest_of(other) != digest_of(array)
    if size > 1:
        assert digest_of(array[::-1]) != digest_of(array)
