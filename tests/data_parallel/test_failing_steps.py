"""Steps that fail on some or all ranks: gradients of different steps are never averaged, and no rank waits long."""

import contextlib
import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.worlds import on_every_worker
from jax.experimental.sparse import BCOO

import jdistgrad as jd
from jdistgrad.collectives.roll_call import Act
from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.agreement import PlannedStep
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import CollectiveError, DisagreementError, LeafError
from jdistgrad.wire.polling import poll

MIXED = {"a": jnp.ones(3), "b": jnp.ones(4, jnp.float16), "c": jnp.ones(5, jnp.bfloat16)}  # three buckets


def half_a_step(dp, number):
    """Begin a step that fails after ``number`` of its gradients."""
    reduction = dp.reduction(MIXED)
    for leaf in range(3)[::-1][:number]:
        reduction.ready(leaf, jnp.copy(jax.tree.leaves(MIXED)[leaf]))


@on_every_worker
def test_steps_abandoned_at_different_places_end_in_an_error_for_all(big_world, rank, size):
    # Otherwise one rank's third step would be averaged with another's fourth.
    dp = DataParallel(timeout=20)
    dp.average(MIXED)
    half_a_step(dp, 2 if rank == 0 else 0)
    for _ in range(3):
        with pytest.raises(DisagreementError):
            dp.average(MIXED)
    again = DataParallel()
    np.testing.assert_allclose(again.average({"w": jnp.full(2, 1.0 + rank)})["w"], np.full(2, (size + 1) / 2))


@on_every_worker
def test_a_rank_whose_averages_find_no_place_still_reduces_the_next_bucket(big_world, rank, size):
    # The others meet there: they have not failed.
    reduction = DataParallel(bucket_cap_mb=1e-6, timeout=20).reduction([jnp.ones(2)] * 2)
    places = ["nowhere"] if rank == 1 else None
    first = reduction._thread.submit(reduction._average, 0, [jnp.ones(2) + 0], places)
    (averaged,) = reduction._thread.run(reduction._average, 1, [jnp.full(2, 1.0 + rank)], None)
    np.testing.assert_allclose(averaged, np.full(2, (size + 1) / 2))
    assert (first.exception() is None) == (rank != 1)


@on_every_worker
def test_a_rank_that_comes_after_the_others_have_given_up_is_told_so(big_world, rank, size):
    # Over MPI it would wait inside a reduction, to which nobody comes any more, until that ends the job.
    dp, others = DataParallel(timeout=0.2), jd.collectives.of_this_world()
    if rank == 1:
        others.barrier()
    text = "rank [0-3] waits no longer, since not all ranks came in time" if rank == 1 else "rank 1 has not come"
    with pytest.raises(jd.MissingRanksError, match=text):
        dp.average(jnp.ones(3))
    if rank != 1:
        others.barrier()
    np.testing.assert_allclose(DataParallel().average(jnp.full(2, 1.0 + rank)), np.full(2, (size + 1) / 2))


def interrupted(*_, **__):
    raise KeyboardInterrupt


@on_every_worker
def test_ctrl_c_in_a_step_closes_a_data_parallel(big_world, rank, size):
    dp, other = DataParallel(timeout=20), DataParallel()
    if rank == 1:
        step = PlannedStep(dp._driver.plan_for(MIXED), None, interrupted)
        with pytest.raises(KeyboardInterrupt):
            dp._driver._run(dp._driver._overlapped, step, MIXED, Act.REDUCE)
    for _ in range(2):
        with pytest.raises(DisagreementError, match=r"Create a new DataParallel on every rank"):
            dp.average(MIXED)
    np.testing.assert_allclose(other.average(jnp.full(2, 1.0 + rank)), np.full(2, (size + 1) / 2))


@pytest.mark.parametrize(
    ("at", "name", "operation"),
    [
        ("on_host", "allreduce", lambda everybody: everybody.eager("allreduce", jnp.ones(3), "sum")),
        ("members.begin", "a barrier", lambda everybody: everybody.barrier()),
    ],
)
def test_collectives_refuse_further_use_after_ctrl_c_inside_an_operation(monkeypatch, at, name, operation):
    # Otherwise this rank's next operation would meet the others' interrupted one.
    with jd.local_workers(1):
        everybody = jd.collectives.of_this_world()
        with monkeypatch.context() as patch:
            *owner, method = at.split(".")
            patch.setattr(functools.reduce(getattr, owner, everybody), method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                operation(everybody)
        with pytest.raises(CollectiveError, match=rf"Ctrl-C has ended {name}.*Create new collectives on every rank"):
            everybody.allgather_object("x")


def failing_on(ranks, rank):
    """Return a hook that fails once on some ranks, before it reduces."""
    fails = iter([rank in ranks])

    def apply(bucket, state, collectives):
        if next(fails, False):
            raise KeyError("the hook's own")
        return collectives.allreduce(bucket.flat) / bucket.divisor, state

    return hooks.Hook(lambda bucket: (), apply, "failing")


@on_every_worker
def test_a_hook_that_fails_on_one_rank_is_told_to_the_others_at_once(big_world, rank, size):
    dp, other = DataParallel(hook=failing_on({1}, rank), timeout=15), DataParallel()
    said = "rank 1 has failed at bucket 0 in step 1"
    with pytest.raises(KeyError) if rank == 1 else pytest.raises(DisagreementError, match=said):
        dp.average({"w": jnp.ones(2)})
    other.average({"w": jnp.ones(2)})
    with pytest.raises(DisagreementError):
        dp.average({"w": jnp.ones(2)})


def failing_layer(fails):
    def checked(g):
        if fails:
            raise RuntimeError("the loss's own")
        return g

    @jax.custom_vjp
    def layer(w):
        return w * 2

    layer.defvjp(lambda w: (w * 2, None), lambda _, g: (2 * jax.pure_callback(checked, g, g),))
    return layer


def failing_loss(fails):
    layer = failing_layer(fails)
    return lambda params: sum(layer(w).sum() for w in params)


@pytest.mark.parametrize("overlap", [True, False])
@on_every_worker
def test_a_backward_pass_that_fails_on_one_rank_is_told_to_the_others(big_world, overlap, rank, size):
    dp, other = DataParallel(bucket_cap_mb=1e-6, overlap=overlap, timeout=15), DataParallel()
    step = dp.value_and_grad(failing_loss(rank == 1))
    params = [jnp.ones(3), jnp.ones(2)]
    with pytest.raises(Exception, match="the loss's own") if rank == 1 else pytest.raises(DisagreementError):
        step(params)
    other.average(params)
    with pytest.raises(DisagreementError):
        dp.average(params)


def owing(fails_at=()):
    """Return a hook that owes 1 more in each step, and sends that in the next. It fails at some buckets."""

    def apply(bucket, owed, collectives):
        averaged = collectives.allreduce((bucket.flat + owed) / bucket.divisor)
        if bucket.index in fails_at:
            raise KeyError("the hook's own")
        return averaged, owed + 1

    return hooks.Hook(lambda bucket: jnp.zeros(()), apply, "owing")


@pytest.mark.host_memory  # over devices a hook is part of a program: it fails while that is traced
@on_every_worker
def test_a_hook_that_fails_on_all_ranks_owes_what_it_owed_before(big_world, rank, size):
    fails_at, zeros = [], [jnp.zeros(3), jnp.zeros(2)]
    dp = DataParallel(hook=owing(fails_at), bucket_cap_mb=1e-6)
    for number in range(2):
        found = [leaf[0] for leaf in dp.average(zeros)]
        np.testing.assert_allclose(found, [number, number], rtol=1e-6)
    fails_at.append(1)  # when bucket 0 has been reduced
    for _ in range(2):
        with pytest.raises(KeyError):
            dp.average(zeros)
    fails_at.clear()
    np.testing.assert_allclose([leaf[0] for leaf in dp.average(zeros)], [2, 2], rtol=1e-6)


@on_every_worker
def test_a_hook_owes_what_it_owed_before_a_loss_that_fails_on_all_ranks(big_world, rank, size):
    # Its backward pass fails when the first bucket is on its way already.
    dp, params, zeros = (
        DataParallel(hook=owing(), bucket_cap_mb=1e-6, overlap=True),
        [jnp.ones(3)] * 2,
        [jnp.zeros(3)] * 2,
    )
    dp.average(zeros)
    layer = failing_layer(fails=True)
    for _ in range(2):
        with pytest.raises(Exception, match="the loss's own"):
            dp.value_and_grad(lambda ws: layer(jnp.sin(ws[0])).sum() + ws[1].sum())(params)
    np.testing.assert_allclose([leaf[0] for leaf in dp.average(zeros)], [1, 1], rtol=1e-6)


@on_every_worker
def test_ranks_that_have_joined_outlast_a_step_that_fails_on_all_others(big_world, rank, size):
    dp, params = DataParallel(), [jnp.ones(3), jnp.ones(2)]
    with dp.join(divide_by_initial_world_size=False) as join:
        if rank:
            with pytest.raises(Exception, match="the loss's own"):
                dp.value_and_grad(failing_loss(True))(params)
            params = dp.average([leaf * rank for leaf in params])
        params = join.finish(params)
    np.testing.assert_allclose(params[0], np.full(3, size / 2), rtol=1e-6)


@on_every_worker
def test_gradients_that_one_rank_cannot_hand_over(big_world, rank, size):
    # Rank 1's sparse layout is refused after the step has begun.
    dp, other = DataParallel(timeout=15), DataParallel()
    shape = (3, 1) if rank == 1 else (3, 3)  # of the data
    indices = np.zeros((3, 1, 1) if rank == 1 else (3, 1), "int32")
    expected = (LeafError, "1 batch dimensions") if rank == 1 else (DisagreementError, "rank 1 has failed")
    with pytest.raises(expected[0], match=expected[1]):
        dp.average({"t": BCOO((jnp.ones(shape), jnp.asarray(indices)), shape=(3, 3))})
    other.average({"w": jnp.ones(2)})


@on_every_worker
def test_losses_over_values_that_are_being_differentiated_elsewhere(world, rank, size):
    dp = DataParallel()

    def outer(w):
        return dp.value_and_grad(lambda p: (p * w).sum())(jnp.ones(3))[0]

    with pytest.raises(CollectiveError):
        jax.grad(outer)(jnp.ones(3))
    through = jax.grad(lambda w: dp.value_and_grad(lambda p, w: (p * w).sum())(jnp.ones(3), w)[0])
    np.testing.assert_array_equal(through(jnp.ones(3)), np.ones(3))


@pytest.mark.parametrize("seen", [True, False], ids=["tree seen before", "new tree"])
@on_every_worker
def test_a_loss_that_cannot_be_traced_on_one_rank_is_told_to_the_others(big_world, seen, rank, size):
    dp = DataParallel(timeout=15)
    step = dp.value_and_grad(lambda params, x: jnp.sum(x @ params))
    if seen:
        step(jnp.ones(3), jnp.ones((2, 3)))
    error, text = (TypeError, "dot_general") if rank == 1 else (DisagreementError, "failed")
    with pytest.raises(error, match=text):
        step(jnp.ones(3), jnp.ones((2, 4 if rank == 1 else 3)))
    with pytest.raises(DisagreementError):  # not the average of another step of rank 1's
        step(jnp.ones(3), jnp.ones((2, 3)))


@on_every_worker
def test_a_loss_that_cannot_be_traced_on_any_rank_can_be_put_right(world, rank, size):
    step = DataParallel(timeout=15).value_and_grad(lambda params, x: jnp.sum(x @ params))
    for _ in range(2):
        with pytest.raises(TypeError):
            step(jnp.ones(3), jnp.ones((2, 4)))
    np.testing.assert_allclose(step(jnp.ones(3), jnp.full((2, 3), rank))[1], np.full(3, size - 1.0))


@on_every_worker
def test_an_object_that_refuses_further_steps_keeps_nothing_of_the_caller_alive(big_world, rank, size):
    """A reference in the caller's frame might be to this object itself, which would then never be freed."""
    dp = DataParallel(hook=failing_on({1}, rank), timeout=15)

    def take():
        held = threading.Event()
        with contextlib.suppress(KeyError, DisagreementError):
            dp.average({"w": jnp.ones(2)})
        return weakref.ref(held)

    for _ in range(3):
        found = take()
        assert poll(lambda found=found: gc.collect() >= 0 and found() is None, 10)
