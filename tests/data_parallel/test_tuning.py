"""The bucket size that is chosen by measurement: the state machine, and steps that go through it."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.interruptions import press_ctrl_c
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.data_parallel.buckets.leaves import describe
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.data_parallel.reducing.agreement import Terms
from jdistgrad.data_parallel.reducing.settings import Rules
from jdistgrad.data_parallel.reducing.tuning import CAPS, ROUNDS, Tuning
from jdistgrad.errors import DisagreementError
from jdistgrad.optim.averaging import average_gradients
from jdistgrad.wire.interrupts import wait_in_slices

MIB = 1 << 18  # float32 numbers


def plan_of(sizes, cap=None):
    leaves = tuple(describe([jax.ShapeDtypeStruct((int(size * MIB),), jnp.float32) for size in sizes]))
    return Rules(cap).plan(Terms(leaves, ()), None)


def test_each_size_is_tried_in_every_round_and_the_fastest_stays():
    tuning, plan, seconds = (
        Tuning(Rules("auto")),
        plan_of([0.6] * 300),
        dict(zip(CAPS, [4.0, 2.0, 1.0, 3.0, 5.0], strict=True)),
    )
    asked = []
    while tuning.medians is None:
        asked.append(tuning.cap)
        tuning.note(plan, seconds[tuning.cap] + (100 if len(asked) <= len(CAPS) else 0))
    assert asked == list(CAPS) * ROUNDS
    assert tuning.medians == [seconds[cap] for cap in CAPS]
    tuning.decide([seconds[cap] for cap in CAPS])
    assert tuning.cap == 4
    assert tuning.trials == tuple(seconds.items())
    tuning.note(plan, 1e-9)
    assert (tuning.cap, tuning.medians) == (4, None)


def test_sizes_with_the_same_buckets_are_tried_once():
    tuning, small = Tuning(Rules("auto")), plan_of([0.01, 0.02])
    for _ in range(ROUNDS):
        assert tuning.cap == CAPS[0]
        tuning.note(small, 1.0)
    assert tuning.medians == [1.0]
    some = Tuning(Rules("auto"))
    some.note(plan_of([0.7] * 8), 1.0)  # 5.6 MiB: one bucket for 25 and for 100
    assert list(some._times) == [None, 1.0, 4.0, 25.0]
    assert some.cap == 1.0
    some.note(plan_of([0.1]), 1.0)  # another tree does not count
    assert some.cap == 1.0


@pytest.mark.parametrize("overlap", [False, True])
@on_every_worker
def test_steps_choose_one_size_on_all_ranks(big_world, overlap, rank, size):
    dp = DataParallel(bucket_cap_mb="auto", overlap=overlap)
    params = [jnp.full((400, 400), 0.01 * k) for k in range(10)]  # 6 MiB: one plan for 25 and 100
    step = dp.value_and_grad(lambda params, x: sum(jnp.sum((p * x) ** 2) for p in params))
    x = jnp.float32(1 + rank)
    expected = jax.tree.map(lambda p: 2 * p * sum((1 + k) ** 2 for k in range(size)) / size, params)
    counts = []
    for _ in range(4 * ROUNDS + 2):
        _, gradients = step(params, x)
        assert_close(gradients, expected)
        counts.append((len(dp.statistics().bucket_sizes), len(dp.statistics().trials)))
    told = dp.statistics()
    assert [one for _, one in counts] == [0] * (4 * ROUNDS) + [4] * 2
    assert len({one for one, _ in counts[: 4 * ROUNDS]}) >= 3
    assert len({one for one, _ in counts[4 * ROUNDS :]}) == 1
    assert [cap for cap, _ in told.trials] == [None, 1.0, 4.0, 25.0]
    assert told.bucket_cap_mb == min(told.trials, key=lambda trial: trial[1])[0]
    everywhere = dp.collectives.allgather_object(told.trials)
    assert everywhere == [told.trials] * size
    dp.verify(gradients)


@on_every_worker
def test_steps_of_uneven_ranks_do_not_count(big_world, rank, size):
    dp = DataParallel(bucket_cap_mb="auto")
    step = dp.value_and_grad(lambda params, x: jnp.sum(params * x))
    with dp.join() as join:
        for _ in range(ROUNDS * (rank + 1)):
            step(jnp.ones(300_000), jnp.ones(300_000))
        join.finish(jnp.ones(1))
    assert dp.statistics().trials == ()
    for _ in range(ROUNDS + 1):
        step(jnp.ones(300_000), jnp.ones(300_000))
    assert len(dp.statistics().trials) == 1


@on_every_worker
def test_averages_of_other_kinds_of_leaves_on_one_rank(big_world, rank, size):
    dp = DataParallel(bucket_cap_mb="auto")
    step = dp.value_and_grad(lambda params: jnp.sum(params))
    for number in (jnp.float32(rank), float(rank) if rank == 1 else np.float32(rank)):
        np.testing.assert_allclose(dp.average({"loss": number})["loss"], (size - 1) / 2, rtol=1e-6)
        for _ in range(2):
            step(jnp.ones(3))


@on_every_worker
def test_a_step_that_is_interrupted_on_one_rank_counts_on_all(big_world, rank, size):
    dp = DataParallel(bucket_cap_mb="auto")
    params = [jnp.full((400, 400), 0.01 * k) for k in range(10)]
    step = dp.value_and_grad(lambda params: sum(jnp.sum(p**2) for p in params))
    note = dp._driver._note

    def interrupted(*args):
        note(*args)
        raise KeyboardInterrupt

    for number in range(4 * ROUNDS + 1):
        if number == 5 and rank == 1:
            dp._driver._note = interrupted
            with pytest.raises(KeyboardInterrupt):
                step(params)
            dp._driver._note = note
        else:
            step(params)
    assert len(dp.statistics().trials) == 4
    assert dp.collectives.allgather_object(dp.statistics().trials) == [dp.statistics().trials] * size


@on_every_worker
def test_all_ranks_must_measure(big_world, rank, size):
    dp = DataParallel(bucket_cap_mb="auto" if rank == 1 else 25)
    with pytest.raises(DisagreementError, match="bucket_cap_mb is 25 on rank 0, auto on rank 1"):
        dp.value_and_grad(lambda params: jnp.sum(params))(np.ones(3, "float32"))


def test_what_takes_no_steps_cannot_measure():
    with pytest.raises(ValueError, match="measures the steps of a DataParallel"):
        average_gradients(bucket_cap_mb="auto")


_made = {}


def make_here():
    dp = DataParallel(bucket_cap_mb="auto", timeout=20)
    _made[jd.rank()] = dp, dp.value_and_grad(lambda p, x: (p * x).sum())


def step_here():
    """Return the mean of the workers' numbers, as the gradient of a step."""
    rank = jd.rank()
    return float(_made[rank][1](jnp.ones(3), jnp.float32(rank))[1][0])


def press_in_first_wait(frame, event, _):
    if frame.f_code is wait_in_slices.__code__ and event == "call":
        sys.setprofile(None)
        press_ctrl_c()


def test_ctrl_c_while_the_ranks_choose_leaves_the_next_step_in_order():
    with jd.local_workers(2):
        for future in jd.rpc_all(range(2), make_here):
            future.result()
        while _made[0][0]._driver._tuning.medians is None:
            other = jd.rpc_async(1, step_here)
            assert (step_here(), other.result()) == (0.5, 0.5)
        other = jd.rpc_async(1, step_here)
        sys.setprofile(press_in_first_wait)
        with pytest.raises(KeyboardInterrupt):
            step_here()
        assert (step_here(), other.result()) == (0.5, 0.5)
        other = jd.rpc_async(1, step_here)
        assert (step_here(), other.result()) == (0.5, 0.5)
        assert _made[0][0].statistics().trials == _made[1][0].statistics().trials != ()
        _made.clear()
