"""Ctrl-C at a random moment of a call, gradient, staged step, context or pipeline: the next of its kind is right.

The workers are threads: under mpirun Ctrl-C, which all ranks receive, ends the job.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import optax

import jdistgrad as jd
from faults.outcomes import HUNG, Outcome, patience
from faults.program import contexts_left, judged

PROMPT_SECONDS = 0.5
SLACK = 2.0  # three workers on two cores
RATE = 0.5


def scale(params, x):
    return params * x


def add_sum(params, x):
    return x + 2.0 * params.sum()


def add_nothing(params, x):
    return x + 0.0 * params.sum()


def mean(output, target):
    return jnp.mean(output - target)


def make(n: int):
    return jnp.ones(n)


class Session:
    """What a user would run, again and again, in a notebook: worker 0 works with references on the others."""

    def __init__(self) -> None:
        self.refs = [jd.remote(rank, make, args=(3 + rank,)) for rank in range(1, jd.world_size())]
        self.optimizer = jd.DistributedOptimizer(optax.sgd(0.0), self.refs)
        self.staged = jd.jit(self.gradients)
        own = jd.remote(0, make, args=(2,))  # worker 0 has a stage too
        schedule = jd.pipeline.one_f_one_b(1 + len(self.refs), 4)
        stages = [(add_nothing, own), *((add_sum, ref) for ref in self.refs)]
        self.pipeline = jd.Pipeline(stages, schedule, loss=mean)

    def loss(self, *refs):
        futures = [jd.rpc_async(1 + k, scale, args=(ref, 2.0)) for k, ref in enumerate(refs)]
        return sum(future.result().sum() for future in futures)

    def gradients(self, *refs):
        value, found = jd.value_and_grad(self.loss, argnums=tuple(range(len(refs))))(*refs)
        self.optimizer.step(found)
        return value

    def expected(self) -> float:
        return sum(2.0 * (3 + rank) for rank in range(1, jd.world_size()))

    def call(self) -> float:
        return float(jd.rpc_sync(1, scale, args=(self.refs[0], 2.0)).sum()) + self.expected() - 2.0 * 4

    def step(self) -> float:
        return float(self.gradients(*self.refs))

    def staged_step(self) -> float:
        return float(self.staged(*self.refs))

    def in_a_context(self) -> float:
        with jd.context() as ctx:
            value, _ = jd.backward(ctx, self.loss, *self.refs)
            return float(value)

    def pipeline_step(self) -> float:
        zeros = np.zeros((8, 3), "float32")
        with jd.context() as ctx:
            value = self.pipeline.step(zeros, targets=zeros)
            self.optimizer.step(ctx)
            return float(value)


def play(chance: random.Random, count: int) -> Iterator[Outcome]:
    with jd.local_workers(3):
        session = Session()
        works = [session.call, session.step, session.staged_step, session.in_a_context, session.pipeline_step]
        usual = {work: seconds(work) for work in works for _ in range(2)}
        for _ in range(count):
            work = chance.choice(works)
            yield interrupted(work, chance.uniform(0.0, 1.2 * usual[work]), session.expected())
        del session, works, usual, work
        assert contexts_left() == []


def seconds(work: Callable[[], float]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def interrupted(work: Callable[[], float], delay: float, expected: float) -> Outcome:
    fault, named = f"{work.__name__} after {1e3 * delay:.2f} ms", False
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    try:
        try:
            timer.start()
            work()
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            named = True
        back = time.monotonic() - start - delay
        timer.join()
        time.sleep(0.001)
    except KeyboardInterrupt:
        named = True
    if named and back > SLACK * PROMPT_SECONDS * patience():
        return Outcome(HUNG, fault, f"the prompt was back after {back:.1f} s", back)
    found = work()
    return judged(fault, "" if found == expected else f"then {found}, not {expected}", named=named)
