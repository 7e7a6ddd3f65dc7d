"""Futures that calls return, and futures that served functions return as their answers."""

import asyncio
import concurrent.futures
import threading
import time

import pytest
from helpers.programs import square
from helpers.worlds import on_worker0, peers

import jdistgrad as jd
from jdistgrad.rpc.current import current_scope

pytestmark = pytest.mark.world(1, 3)


@on_worker0
def test_futures_are_concurrent_futures(world):
    futures = [jd.rpc_async(peer, square, args=(k,)) for k in range(5) for peer in peers()]
    done, _ = concurrent.futures.wait(futures)
    assert sorted(future.result() for future in done) == sorted(k * k for k in range(5) for _ in peers())
    assert futures[0].result() == futures[0].result() == 0
    assert futures[0].exception() is None


@on_worker0
def test_only_the_answer_completes_the_future_of_a_call_whose_callbacks_may_call(world):
    """Callbacks run where waiting is allowed, not on the thread that moves messages."""
    outcome = concurrent.futures.Future()

    def chained(future):
        outcome.set_result(jd.rpc_sync(peers()[0], square, args=(future.result(),)))

    future = jd.rpc_async(peers()[0], slow_square, args=(3,))
    with pytest.raises(TypeError):
        future.set_result(5)
    future.add_done_callback(chained)
    assert outcome.result(20) == 81


@on_worker0
def test_asyncio_awaits_the_future_of_a_call(world):
    async def answer(function, argument):
        return await asyncio.wrap_future(jd.rpc_async(peers()[0], function, args=(argument,)))

    assert asyncio.run(answer(square, 3)) == 9
    with pytest.raises(KeyError):
        asyncio.run(answer(fail, "here"))


def fail(text):
    raise KeyError(text)


@pytest.mark.parametrize("function", ["square", "slow_square"])
@on_worker0
def test_then_goes_on_with_the_result(world, function):
    called_by = []

    def add_one(value):
        called_by.append(threading.current_thread())
        return value + jd.rpc_sync(peers()[0], square, args=(1,))

    after = jd.rpc_async(peers()[0], globals()[function], args=(3,)).then(add_one).then(str)
    assert after.result(20) == "10"
    assert len(called_by) == 1


@on_worker0
def test_then_stays_in_the_context_it_was_called_in(world):
    with jd.context() as ctx:
        future = jd.rpc_async(peers()[0], slow_square, args=(3,))
        late = future.then(lambda value: current_scope().id)
        assert late.result(20) == ctx.id
        assert future.then(lambda value: current_scope().id).result(20) == ctx.id
    assert jd.rpc_async(peers()[0], square, args=(3,)).then(lambda value: current_scope()).result(20) is None


@on_worker0
def test_then_inside_a_derivative(world):
    def loss(x):
        return jd.rpc_async(peers()[0], square, args=(x,)).then(lambda value: 2 * value).result()

    for run in (jd.grad(loss), jd.jit(jd.grad(loss))):
        with jd.context():
            assert float(run(3.0)) == 12.0


@on_worker0
def test_then_passes_a_failure_on(world):
    called = []
    after = jd.rpc_async(peers()[0], fail, args=("there",)).then(called.append)
    with pytest.raises(KeyError):
        after.result(20)
    assert called == []
    after = jd.rpc_async(peers()[0], square, args=(3,)).then(fail)
    with pytest.raises(KeyError):
        after.result(20)


def slow_square(x):
    time.sleep(0.05)
    return x * x


def later(x):
    """Return a future. The worker answers when the future is done; no thread waits meanwhile."""
    future = concurrent.futures.Future()
    threading.Timer(0.05, future.set_result, [x + 1]).start()
    return future


def relayed(rank, x):
    return jd.rpc_async(rank, square, args=(x,))


@on_worker0
def test_a_function_may_answer_with_a_future(world):
    last = jd.world_size() - 1
    assert jd.rpc_sync(last, later, args=(1,)) == 2
    assert jd.rpc_sync(last, relayed, args=(0, 7)) == 49
    assert jd.remote(last, later, args=(5,)).to_here() == 6
    with pytest.raises(ZeroDivisionError):
        jd.rpc_sync(last, failing_later)


def failing_later():
    future = concurrent.futures.Future()
    future.set_exception(ZeroDivisionError("later"))
    return future
