"""Calls with an unknown worker, an object that is no function, or code: a clear error, and the world works on."""

import concurrent.futures
import operator

import jax
import pytest
from helpers.worlds import last, needs_pickling, on_worker0, still_works, wire_world as wire_world

import jdistgrad as jd


async def waits(x):
    return x


@pytest.mark.parametrize(
    ("to", "function", "args", "error"),
    [
        ("nobody", operator.add, (1, 2), jd.UnknownWorkerError),
        (99, operator.add, (1, 2), jd.UnknownWorkerError),
        (0, "add", (1, 2), jd.FunctionError),
        (0, waits, (1,), jd.FunctionError),  # nobody may ever read the answer
        (0, operator.neg, 3, TypeError),
    ],
)
@on_worker0
def test_calls_that_cannot_be(world, to, function, args, error):
    for call in (jd.rpc_sync, jd.rpc_async, jd.remote):
        with pytest.raises(error):
            call(to, function, args=args)
    still_works()


class Waiting:
    async def method(self, x):
        return x


def waits_in_a_future(x):
    future = concurrent.futures.Future()
    future.set_result(waits(x))
    return future


@pytest.mark.parametrize("function", [waits, Waiting().method, waits_in_a_future], ids=["function", "method", "future"])
@on_worker0
def test_async_functions_are_refused(world, function):
    refused = pytest.raises(jd.FunctionError, match=r"is an async function, .*asyncio\.run")
    with refused:
        jd.rpc_sync(last(), function, args=(1,))
    with refused:
        jd.remote(last(), function, args=(1,)).to_here()
    with refused, jd.context():
        jax.grad(lambda x: jd.rpc_sync(last(), function, args=(x,)))(1.0)
    with refused, jd.context():
        jax.grad(lambda x: jd.remote(last(), function, args=(x,)).to_here())(1.0)
    with refused:
        jd.jit(lambda x: jd.rpc_sync(last(), function, args=(x,)))(1.0)


@needs_pickling
@on_worker0
def test_a_function_the_other_side_does_not_have(wire_world):
    global only_here
    only_here = make_only_here()
    with pytest.raises(jd.FunctionError) as caught:
        jd.rpc_sync(last(), only_here)
    assert f"On worker{last()}" in caught.value.__notes__[0]
    still_works()


def make_only_here():
    def only_here():
        return 1

    only_here.__qualname__ = "only_here"
    return only_here
