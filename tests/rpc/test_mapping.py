"""``map`` over workers: tasks to whoever is free."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest
from helpers.worlds import on_worker0

import jdistgrad as jd
from jdistgrad.errors import WorkerLostError
from jdistgrad.rpc.api import Feed
from jdistgrad.rpc.directory import WorkerInfo

pytestmark = pytest.mark.world(1, 3)


def add(x, y=0):
    return x + y


def where(x):
    return jd.rank()


def fail_on_three(x):
    if x == 3:
        raise KeyError("three")
    return x


def slow_on_worker1(x):
    if jd.rank() == 1:
        time.sleep(0.3)
    return jd.rank()


def scope_and_worker(x):
    with pytest.raises(jd.ContextError), jd.context():
        pass
    return x


@on_worker0
def test_results_come_in_the_order_of_the_items(world):
    assert list(jd.map(add, range(20))) == list(range(20))
    assert list(jd.map(add, range(5), iter([10, 20, 30]))) == [10, 21, 32]
    assert list(jd.map(add, [])) == []


@on_worker0
def test_the_others_work_by_default(big_world):
    assert set(jd.map(where, range(20))) <= {1, 2}
    assert set(jd.map(where, range(20), workers=["worker2"])) == {2}


@on_worker0
def test_a_slow_worker_does_not_keep_the_others(big_world):
    done_by = list(jd.map(slow_on_worker1, range(12)))
    assert done_by.count(1) < done_by.count(2)


def stop_at_three(k):
    if k == 3:
        raise StopIteration("no more")
    return k


@pytest.mark.parametrize(("function", "error"), [(fail_on_three, KeyError), (stop_at_three, RuntimeError)])
@on_worker0
def test_an_exception_ends_the_iteration_at_its_item_and_not_quietly(world, function, error):
    results = jd.map(function, range(50))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(error):
        next(results)
    found = [*jd.map(function, range(4), return_exceptions=True)]
    assert isinstance(found[3], KeyError | StopIteration)


@on_worker0
def test_calls_belong_to_the_context_they_were_mapped_in(world):
    with jd.context():
        assert list(jd.map(scope_and_worker, range(4))) == [0, 1, 2, 3]


@on_worker0
def test_a_bar_shows_the_progress(world, capfd):
    assert list(jd.map(add, range(3), progress="adding")) == [0, 1, 2]
    assert "adding" in capfd.readouterr().err


@on_worker0
def test_traced_items_are_refused(world):
    with jd.context(), pytest.raises(jd.EncodingError):
        jax.grad(lambda x: sum(jd.map(add, [x, x])))(jnp.float32(1))


class Lost:
    """Calls of workers of which some are lost, from their ``k``-th call on."""

    def __init__(self, **from_call):
        self._from, self._lock = from_call, threading.Lock()
        self._calls = dict.fromkeys(from_call, 0)

    def __call__(self, worker, task):
        with self._lock:
            self._calls[worker.name] += 1
            if self._calls[worker.name] > self._from[worker.name]:
                raise WorkerLostError("gone", worker=worker)
        return task


@pytest.mark.parametrize(("others", "failed"), [(100, [2]), (3, [2, 6, 7, 8, 9])])
def test_a_lost_worker_takes_no_more_tasks_and_without_workers_the_rest_fails(others, failed):
    workers = [WorkerInfo(rank, name) for rank, name in enumerate("ab")]
    feed = Feed(Lost(a=2, b=others), list(range(10)), workers)
    for worker in workers:
        feed.keep_busy(worker, None)
    results = list(feed.results(in_order=True, return_exceptions=True))
    assert [k for k, one in enumerate(results) if isinstance(one, WorkerLostError)] == failed
    assert [one for one in results if not isinstance(one, WorkerLostError)] == [k for k in range(10) if k not in failed]
