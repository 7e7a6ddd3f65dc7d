"""Very many and very large things: served, with memory that does not grow beyond what they need."""

import operator
import random
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd
from faults.outcomes import Outcome
from faults.program import judged

GIB = 1 << 30


def calls_in_flight(number: int) -> str:
    futures = [jd.rpc_async(1 + k % 2, operator.mul, args=(k, 3)) for k in range(number)]
    found = [future.result() for future in futures]
    return "" if found == [3 * k for k in range(number)] else "a result is wrong"


def weigh(params, x):
    return (params * x).sum()


def make(n):
    return jnp.ones(n)


def open_contexts(number: int) -> str:
    """Open contexts on threads of their own, since a thread is in one context at a time, and keep them open."""
    param = jd.remote(1, make, args=(3,))
    gradients = [jd.value_and_grad(weigh_there)(param, float(k))[1] for k in range(number)]
    found = [float(gradient.to_here()[0]) for gradient in gradients]
    return "" if found == [float(k) for k in range(number)] else "a gradient is wrong"


def weigh_there(param, x):
    return jd.rpc_sync(1, weigh, args=(param, x))


def nest(depth):
    if depth == 0:
        return 0
    return 1 + jd.rpc_sync((jd.rank() + 1) % jd.world_size(), nest, args=(depth - 1,))


def nested_calls(number: int) -> str:
    found = nest(number)
    return "" if found == number else f"{found} calls, not {number}"


def double(tree):
    return jax.tree.map(lambda leaf: 2 * leaf, tree)


def leaves(number: int) -> str:
    tree = {f"leaf {k}": np.full(k % 3, k, np.float32) for k in range(number)}
    found = jd.rpc_sync(1, double, args=(tree,), timeout=300)
    return "" if all(np.array_equal(found[key], 2 * leaf) for key, leaf in tree.items()) else "a leaf is wrong"


def flip(array):
    array = np.array(array)
    array ^= 0xFF
    return array


def bytes_each_way(number: int) -> str:
    sent = np.arange(number // 8, dtype=np.uint64).view(np.uint8)
    found = jd.rpc_sync(1, flip, args=(sent,), timeout=600)
    sent ^= 0xFF
    return "" if np.array_equal(found, sent) else "a byte is wrong"


FULL: dict[Callable[[int], str], int] = {
    calls_in_flight: 10_000,
    open_contexts: 1_000,
    nested_calls: 300,
    leaves: 100_000,
    bytes_each_way: 5 * GIB,
}
SHORT: dict[Callable[[int], str], int] = {
    calls_in_flight: 1_000,
    open_contexts: 50,
    nested_calls: 60,
    leaves: 2_000,
    bytes_each_way: GIB // 8,
}


def play(chance: random.Random, count: int) -> Iterator[Outcome]:
    """Try each limit; all of them in full if as many are asked for as there are."""
    me = jd.init(timeout=300)
    numbers = FULL if count >= len(FULL) else SHORT
    for demand in list(numbers)[:count]:
        problem = demand(numbers[demand]) if me.rank == 0 else ""
        yield judged(f"{demand.__name__} {numbers[demand]}", problem, named=False)
    jd.shutdown()
