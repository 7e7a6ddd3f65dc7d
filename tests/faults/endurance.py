"""A long mixed load with contexts and references abandoned on the way: numbers stay right, and nothing accumulates."""

import gc
import operator
import random
import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdistgrad as jd
from faults.outcomes import Outcome
from faults.program import judged
from jdistgrad.rpc.worker import current_worker

SLICE_SECONDS = 1.0
WARM_SLICES = 5  # compiling, pools of threads and memory
MIB_ALLOWED = 48.0
THREADS_ALLOWED = 2  # the others end when they have nothing to do
KEPT = {"values": 2, "calls": 0, "contexts": 0}  # parameters and their optimizer's state


def make(n):
    return jnp.arange(float(n))


def weigh(params, x):
    return params * x


def fail(text):
    raise ValueError(text)


class Load:
    """What one rank does again and again. Each method returns what was wrong."""

    def __init__(self, rank: int, size: int, chance: random.Random):
        self.rank, self.size, self.chance, self.peer = rank, size, chance, (rank + 1) % size
        self.params = jd.remote(self.peer, make, args=(7 + rank,))
        self.optimizer = jd.DistributedOptimizer(optax.sgd(0.0), [self.params])
        self.parallel = jd.DataParallel(timeout=60)
        self.staged = jd.jit(self.gradient)
        self.works: list[Callable[[], str]] = [self.call, self.burst, self.raises, self.step, self.staged_step]
        self.works += [self.abandon_reference, self.abandon_context, self.large]

    def call(self) -> str:
        k = self.chance.randrange(1000)
        return "" if jd.rpc_sync(self.peer, operator.add, args=(k, 1)) == k + 1 else "call"

    def burst(self) -> str:
        found = [jd.rpc_async(k % self.size, operator.mul, args=(k, 3)) for k in range(20)]
        return "" if [one.result() for one in found] == [3 * k for k in range(20)] else "burst"

    def raises(self) -> str:
        try:
            jd.rpc_sync(self.peer, fail, args=("on purpose",))
        except ValueError:
            return ""
        return "no error"

    def loss(self, params, x):
        return jd.rpc_sync(self.peer, weigh, args=(params, x)).sum()

    def gradient(self, params, x):
        value, found = jd.value_and_grad(self.loss)(params, x)
        self.optimizer.step(found)
        return value

    def step(self) -> str:
        return self.checked(self.gradient)

    def staged_step(self) -> str:
        return self.checked(self.staged)

    def checked(self, gradient) -> str:
        n = 7 + self.rank
        x = float(self.chance.randrange(5))
        return "" if float(gradient(self.params, x)) == x * n * (n - 1) / 2 else gradient.__name__

    def abandon_reference(self) -> str:
        other = (self.rank + 2) % self.size
        jd.rpc_async(other, weigh, args=(jd.remote(self.peer, make, args=(5,)).to_here(), 2.0))
        return ""

    def abandon_context(self) -> str:
        jd.value_and_grad(self.loss)(self.params, 3.0)
        return ""

    def large(self) -> str:
        sent = np.full(1 << 16, self.chance.randrange(100), np.float32)
        return "" if np.array_equal(jd.rpc_sync(self.peer, weigh, args=(sent, 2)), 2 * sent) else "large"

    def slice(self) -> str:
        """Work for a while, then meet the others."""
        end, wrong = time.monotonic() + SLICE_SECONDS, ""
        while time.monotonic() < end:
            wrong = wrong or self.chance.choice(self.works)()
        mean = self.parallel.average({"w": jnp.full(1000, float(self.rank))})["w"]
        return wrong or ("" if np.array_equal(mean, np.full(1000, (self.size - 1) / 2)) else "average")


def tables() -> dict[str, int]:
    """Return how many values, calls and contexts this worker holds."""
    worker = current_worker()
    return {
        "values": len(worker.references.owned.entries),
        "calls": len(worker.calls.pending),
        "contexts": len(worker.scopes.identifiers()),
    }


def settled(threads: int) -> dict[str, int]:
    """Return the sizes of the tables once what was abandoned has been released, and idle threads have ended."""
    deadline, found = time.monotonic() + 20.0, tables()
    while (found != KEPT or threading.active_count() > threads) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
        found = tables()
    return found


def resident() -> float:
    """Return the memory of this process in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / (1 << 20)


def play(chance: random.Random, count: int) -> Iterator[Outcome]:
    me = jd.init(timeout=60)
    load = Load(me.rank, jd.world_size(), random.Random(chance.random() + me.rank))
    for _ in range(WARM_SLICES):
        load.slice()
    memory, threads = resident(), threading.active_count()
    for k in range(count):
        wrong = load.slice()
        yield judged(f"second {k}", wrong, named=False) if k < count - 1 else at_the_end(load, wrong, memory, threads)
    jd.shutdown()


def at_the_end(load: Load, wrong: str, memory: float, threads: int) -> Outcome:
    """Judge the last slice, and what has accumulated."""
    jax.effects_barrier()
    load.parallel.average({"w": jnp.ones(3)})  # the others have stopped too
    held = settled(threads + THREADS_ALLOWED)
    load.parallel.average({"w": jnp.ones(3)})
    more, added = resident() - memory, threading.active_count() - threads
    said = f"{more:+.0f} MiB, {added:+d} threads, {held}"
    print(f"endurance, rank {load.rank}: {said}", flush=True)
    flat = more <= MIB_ALLOWED and added <= THREADS_ALLOWED and held == KEPT
    return judged(f"the end: {said}", wrong or ("" if flat else f"not flat: {said}"), named=False)
