"""Messages that are late, come twice, or come when nobody waits any more: the numbers are those of quiet traffic.

Over MPI no message comes twice by itself: here each rank sends some frames again, and some late.
"""

import contextlib
import logging
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers.unruly import Fate, Fates, make_unruly

import jdistgrad as jd
from faults.outcomes import Outcome
from faults.program import judged

PATIENCE = 0.02  # of callers that do not wait for a slow function
SERIAL_STEPS = 3


def make(n):
    return jnp.linspace(-1.0, 1.0, n)


def weigh(params, x):
    return jnp.sin(params * x)


def slow(seconds):
    time.sleep(seconds)
    return seconds


def count(step: int) -> int:
    """Count calls: one that is served twice counts twice."""
    with _lock:
        _counted[step] = _counted.get(step, 0) + 1
        return _counted[step]


_counted: dict[int, int] = {}
_lock = threading.Lock()


def counted() -> dict[int, int]:
    return _counted


class Training:
    """Steps of a small model on the other ranks, whose numbers are compared bit for bit."""

    def __init__(self, rank: int, size: int):
        self.peers = [(rank + k) % size for k in range(1, size)]

    def run(self) -> list[Any]:
        refs = [jd.remote(peer, make, args=(5 + peer,)) for peer in self.peers]
        optimizer = jd.DistributedOptimizer(optax.adam(0.1), refs)
        losses = []
        for step in range(SERIAL_STEPS):
            value, found = jd.value_and_grad(self.loss, argnums=(0, 1))(refs, jnp.float32(1 + step))
            optimizer.step(found[0])
            losses += [value, found[1]]
        return [np.asarray(one) for one in [*losses, *(ref.to_here() for ref in refs)]]

    def loss(self, refs, x):
        futures = [jd.rpc_async(peer, weigh, args=(ref, x)) for peer, ref in zip(self.peers, refs, strict=True)]
        return sum(future.result().sum() for future in futures)


def give_up(peer: int) -> None:
    """Call a slow function and, unless this thread is slower still, give up: the answer comes when nobody waits."""
    with contextlib.suppress(jd.CallTimeoutError):
        jd.rpc_sync(peer, slow, args=(2 * PATIENCE,), timeout=PATIENCE)


def play(chance: random.Random, count_: int) -> Iterator[Outcome]:
    logging.getLogger("jdistgrad.wire").setLevel(logging.CRITICAL)  # each refusal is logged
    me = jd.init(timeout=60)
    training = Training(me.rank, jd.world_size())
    quiet = training.run()
    shares = {Fate.LATE: 0.3, Fate.TWICE: 0.3}
    fates = make_unruly(fates=Fates(random.Random(chance.random() + me.rank), shares))
    for k in range(count_):
        give_up(training.peers[k % len(training.peers)])
        found = training.run()
        same = all(np.array_equal(one, other) for one, other in zip(found, quiet, strict=True))
        problem = "" if same else "other numbers than in quiet traffic"
        called = [jd.rpc_async(peer, count, args=(1000 * me.rank + k,)).result() for peer in training.peers]
        problem += "" if called == [1] * len(called) else f" a call was served {max(called)} times"
        yield judged(f"round {k}", problem, named=False)
    jax.effects_barrier()
    if any(times != 1 for times in counted().values()):
        raise AssertionError(f"calls were served again: {counted()}")
    print(f"rank {me.rank}: {fates}", flush=True)
    jd.shutdown(timeout=30)
