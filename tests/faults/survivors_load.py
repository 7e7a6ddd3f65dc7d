"""The program of jobs that survive: ranks call, pass references on and differentiate, and some are killed meanwhile.

Each survivor checks every number, and that only what needs the dead fails. At its end it prints a line of JSON.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import optax
from helpers.unruly import make_all_unruly

import jdistgrad as jd
from jdistgrad.wire import launcher_env

STRUCK, SURVIVOR = "STRUCK ", "SURVIVOR "
KEPT = 8
TO_END = 10.0  # seconds, after which the stacks of a survivor are of interest
TO_PRINT = 0.05  # seconds, for mpirun to read what a victim says

kept: list[jd.RRef] = []
keeping = threading.Event()


def strike() -> None:
    moment = time.time() + TO_PRINT
    print(f"{STRUCK}{json.dumps([launcher_env.rank(), moment])}", flush=True)
    time.sleep(max(0.0, moment - time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def square(x):
    return x * x


def slow_square(x):
    time.sleep(0.01)
    return x * x


def make(size):
    return jnp.arange(float(size))


def weigh(params, x):
    return params * x


def mean_difference(output, target):
    return jnp.mean(output - target)


def keep(reference):
    """Keep a reference that another worker owns, as long as this one's load runs, and let go of the oldest."""
    kept.append(reference)
    del kept[: -KEPT if keeping.is_set() else None]


def relay(worker, x):
    return jd.rpc_sync(worker, square, args=(x,))


def has_begun():
    return keeping.is_set()


@dataclasses.dataclass
class Report:
    """What a survivor has seen.

    Attributes:
      known: when it was told of each lost worker.
      waits: of each wait that a loss has ended: the lost worker, and when the wait began and ended.
      calls: of each small call: the worker called, when, and how long it took.
    """

    known: dict[str, float] = dataclasses.field(default_factory=dict)
    waits: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    calls: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    done: int = 0
    failed: int = 0
    left: list[str] = dataclasses.field(default_factory=list)


class Load:
    """The load of one rank."""

    def __init__(self, rank: int, size: int, chance: random.Random):
        self.rank, self.size, self.chance, self.report = rank, size, chance, Report()
        jd.on_lost(lambda worker, why: self.report.known.setdefault(str(worker.rank), time.time()))

        self.acts = [self.call, self.slow_call, self.relayed, self.fetch, self.pass_on, self.differentiate]
        self.acts += [self.call, self.train, self.in_stages]

    def warm_up(self) -> None:
        """Do everything once, so that nothing needs to be compiled later."""
        for act in self.acts:
            act((self.rank + 1) % self.size, (self.rank + 2) % self.size)

    def wait_for_the_others(self) -> None:
        """Return when every other worker has begun its load, or has been killed in it."""
        keeping.set()
        for other in range(self.size):
            with contextlib.suppress(jd.WorkerLostError):
                while not jd.rpc_sync(other, has_begun):
                    time.sleep(0.01)

    def run(self, seconds: float) -> Report:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            others = self.chance.sample([rank for rank in range(self.size) if rank != self.rank], 2)
            self.attempt(self.chance.choice(self.acts), *others)
        return self.report

    def attempt(self, act: Callable[[int, int], None], first: int, second: int) -> None:
        """Do something that needs two other workers, or the first of them; it may fail only if one of them is lost."""
        start = time.time()
        try:
            act(first, second)
            self.report.done += 1
        except jd.WorkerLostError as error:
            self.report.failed += 1
            if error.worker is not None:
                self.report.waits.append((error.worker.rank, start, time.time()))
            if error.worker is None or error.worker.rank not in (first, second) or error.worker.name not in str(error):
                self.report.wrong.append(f"{act.__name__} with {first} and {second}: {error}")
        except jd.DistgradError as error:
            self.report.wrong.append(f"{act.__name__} with {first} and {second}: {type(error).__name__}: {error}")

    def right(self, what: str, found: object, expected: object) -> None:
        if not np.array_equal(np.asarray(found), np.asarray(expected)):
            self.report.wrong.append(f"{what}: {found}, not {expected}")

    def call(self, first: int, second: int) -> None:
        start, clock = time.time(), time.perf_counter()
        found = jd.rpc_sync(first, square, args=(3.0,))
        self.report.calls.append((first, start, time.perf_counter() - clock))
        self.right("call", found, 9.0)

    def slow_call(self, first: int, second: int) -> None:
        self.right("slow call", jd.rpc_sync(first, slow_square, args=(3.0,)), 9.0)

    def relayed(self, first: int, second: int) -> None:
        self.right("relayed call", jd.rpc_sync(first, relay, args=(second, 2.0)), 4.0)

    def fetch(self, first: int, second: int) -> None:
        size = self.chance.choice([4, 50_000])
        self.right("fetch", jd.remote(first, make, args=(size,)).to_here(), np.arange(float(size)))

    def pass_on(self, first: int, second: int) -> None:
        reference = jd.remote(first, make, args=(4,))
        jd.rpc_sync(second, keep, args=(jd.by_reference(reference),))
        own = jd.RRef(jnp.ones(3))
        jd.rpc_sync(first, keep, args=(jd.by_reference(own),))

    def differentiate(self, first: int, second: int) -> None:
        params = jd.remote(first, make, args=(4,))
        x = jnp.ones(4) * 2

        def loss(params):
            there = jd.rpc_sync(first, weigh, args=(params, x))
            return there.sum() + jd.rpc_sync(second, weigh, args=(params, x)).sum()

        value, gradient = jd.value_and_grad(loss)(params)
        self.right("loss", value, 24.0)
        self.right("gradient", gradient.to_here(), np.full(4, 4.0))

    def train(self, first: int, second: int) -> None:
        params = [jd.remote(worker, make, args=(3 + worker % 2,)) for worker in (first, second)]
        optimizer = jd.DistributedOptimizer(optax.sgd(0.5), params)

        def loss(*params):
            calls = zip((first, second), params, strict=True)
            return sum(jd.rpc_sync(worker, weigh, args=(param, 2.0)).sum() for worker, param in calls)

        _, gradients = jd.value_and_grad(loss, argnums=(0, 1))(*params)
        optimizer.step(gradients)
        for worker, param in zip((first, second), params, strict=True):
            self.right("trained", param.to_here(), np.arange(3.0 + worker % 2) - 1)

    def in_stages(self, first: int, second: int) -> None:
        params = [*(jd.remote(worker, make, args=(4,)) for worker in (first, second)), jd.RRef(make(4))]
        stages = [(weigh, one) for one in params]
        pipeline = jd.Pipeline(stages, jd.pipeline.one_f_one_b(3, 2), loss=mean_difference)
        with jd.context() as ctx:
            x = np.ones((4, 4), np.float32)
            self.right("loss of stages", pipeline.step(x, targets=0 * x), 9.0)
            self.right("gradient of a stage", jd.get_gradients(ctx)[params[2]], np.arange(4.0) ** 2 / 4)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--victims", type=int, nargs="+", required=True)
    parser.add_argument("--after", type=float, nargs="+", required=True, help="seconds of load, for each victim")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--unruly", action="store_true", help="messages come late")
    parser.add_argument("--note", help="not used: victims say when they are struck")
    return parser.parse_args(arguments)


def main(chosen: argparse.Namespace) -> None:
    if chosen.unruly:
        logging.getLogger("jdistgrad.wire").setLevel(logging.CRITICAL)  # each refusal is logged
        make_all_unruly(chosen.seed)
    me = jd.init("peer{rank}")
    load = Load(me.rank, jd.world_size(), random.Random(f"{chosen.seed} {me.rank}"))
    load.warm_up()
    load.wait_for_the_others()
    for victim, after in zip(chosen.victims, chosen.after, strict=True):
        if victim == me.rank:
            threading.Timer(after, strike).start()
    report = load.run(chosen.seconds)
    keeping.clear()
    kept.clear()
    faulthandler.dump_traceback_later(TO_END)
    left = jd.shutdown(timeout=2 * TO_END)
    report.left = [one for one in left if "context" in one]  # owners keep what the victims held, references in it too
    faulthandler.cancel_dump_traceback_later()
    print(f"{SURVIVOR}{json.dumps([me.rank, dataclasses.asdict(report)])}", flush=True)


if __name__ == "__main__":
    import faults.survivors_load  # the module that other ranks find functions in

    faults.survivors_load.main(options())
