"""Ranks in different kinds of blocks (join, accumulation): every rank raises before anything is summed."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.worlds import on_every_worker

from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import DisagreementError


def mine(rank):
    return {"w": jnp.full(3, rank + 1.0), "b": jnp.full((2, 2), 10.0 * rank)}


@pytest.mark.parametrize("odd", [0, 1, 2])
@on_every_worker
def test_ranks_that_divide_differently_are_told_so(big_world, odd, rank, size):
    # The sums of one step must not be divided by different numbers on different ranks.
    dp, steps = DataParallel(timeout=20), []
    first, second = ("False", "True") if odd == 0 else ("True", "False")
    said = rf"rank 0 is in join\(divide_by_initial_world_size={first}\), rank {odd or 1} in .*={second}\)"

    def train():
        with dp.join(divide_by_initial_world_size=rank != odd) as join:
            steps.extend(dp.average(mine(rank)) for _ in range(1 + (rank != 2)))
            join.finish(mine(rank))

    with pytest.raises(DisagreementError, match=said):
        train()
    assert steps == []


@on_every_worker
def test_blocks_follow_each_other_with_different_divisors(big_world, rank, size):
    # The second block is inside the first: the end of the second must not end the first.
    dp, found = DataParallel(timeout=20), []

    def steps(count):
        found.extend(dp.average({"w": jnp.full(3, rank + 1.0)})["w"][0] for _ in range(count))

    with dp.join(divide_by_initial_world_size=False) as outer:
        with dp.join():
            steps(1 + rank)
        steps(1 + (rank == 2))
        outer.finish({})
    by_all = [sum(r + 1.0 for r in range(step, size)) / size for step in range(1 + rank)]
    by_active = [2.0, 3.0][: 1 + (rank == 2)]
    np.testing.assert_allclose(found, by_all + by_active, rtol=1e-6)


@pytest.mark.parametrize("odd", [0, 1, 2])
@on_every_worker
def test_gradients_accumulated_on_one_rank_are_not_averaged_with_steps_of_others(big_world, odd, rank, size):
    dp = DataParallel(timeout=20)
    step, sums = dp.value_and_grad(lambda w: (w**2).sum() * (rank + 1)), []

    def train():
        with dp.no_sync() if rank == odd else contextlib.nullcontext():
            parts = [step(jnp.arange(3.0) + k)[1] for k in range(2)]
        sums.append(dp.average(jax.tree.map(jnp.add, *parts)))

    with pytest.raises(DisagreementError):
        train()
    assert sums == []


SETTINGS = {
    "bucket_cap_mb": {"bucket_cap_mb": 1e-5},
    "hook": {"hook": hooks.int8(block=8)},
    "find_unused_parameters": {"find_unused_parameters": True},
    "check_finite": {"check_finite": True},
}


@pytest.mark.parametrize("name", SETTINGS)
@on_every_worker
def test_the_settings_of_a_rank_that_has_joined_count_too(big_world, name, rank, size):
    # A rank that has joined gets the tree from the other ranks, but would cut it into buckets by its own settings.
    dp, steps = DataParallel(timeout=20, **({} if rank == 2 else SETTINGS[name])), []

    def train():
        with dp.join() as join:
            if rank != 2:
                steps.append(dp.average({"w": jnp.ones(300), "v": jnp.ones((30, 20)), "u": jnp.ones(7)}))
            join.finish({})

    with pytest.raises(DisagreementError):
        train()
    assert steps == []
