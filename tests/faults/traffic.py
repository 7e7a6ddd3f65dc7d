"""Messages that are late, or come when nobody waits any more: the numbers are those of quiet traffic."""

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers.unruly import make_unruly

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
    me = jd.init(timeout=60)
    training = Training(me.rank, jd.world_size())
    quiet = training.run()
    make_unruly(random.Random(chance.random() + me.rank))
    for k in range(count_):
        give_up(training.peers[k % len(training.peers)])
        found = training.run()
        same = all(np.array_equal(one, other) for one, other in zip(found, quiet, strict=True))
        problem = "" if same else "other numbers than in quiet traffic"
        yield judged(f"round {k}", problem, named=False)
    jax.effects_barrier()
    jd.shutdown(timeout=30)
