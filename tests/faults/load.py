"""The program of the jobs that are struck: ranks call, differentiate, average and update, and check every number.

One rank is struck in a phase of a round. It first writes a note, whose time says when that was.
"""

import argparse
import ctypes
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdistgrad as jd
from jdistgrad.wire import launcher_env

ROUNDS, STRUCK_ROUND = 6, 2
RATE = 0.25  # of the updates: a power of two, so that sums are exact
WRONG = "WRONG:"

ONCE = ("init", "shutdown")
PHASES = (*ONCE, "call", "served", "recording", "pullback", "average", "compiled average", "update", "pipeline", "idle")


class Lost(BaseException):
    """The exception of a rank that fails; it is no Exception."""


def fail() -> None:
    raise Lost("struck on purpose")


def get_stuck_in_python() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def get_stuck_in_c() -> None:
    """Sleep without giving up the lock of the interpreter."""
    ctypes.PyDLL(None).sleep(3600)


def soon(delay: float, number: int) -> None:
    """Send this process a signal in a while, from another thread."""
    threading.Timer(delay, os.kill, (os.getpid(), number)).start()


ACTS: dict[str, Callable[[float], object]] = {
    "kill": lambda delay: soon(delay, signal.SIGKILL),
    "crash": lambda delay: threading.Timer(delay, ctypes.string_at, (0,)).start(),
    "stop": lambda delay: soon(delay, signal.SIGSTOP),
    "deadlock": lambda delay: (time.sleep(delay), get_stuck_in_python()),
    "stick": lambda delay: (time.sleep(delay), get_stuck_in_c()),
    "raise": lambda delay: (time.sleep(delay), fail()),
    "exit": lambda delay: (time.sleep(delay), sys.exit()),
    "_exit": lambda delay: threading.Timer(delay, os._exit, (7,)).start(),
}


class Striker:
    """The fault of one rank, if this process is that rank."""

    def __init__(self, chosen: argparse.Namespace | None = None, rank: int = 0):
        self._chosen = chosen if chosen is not None and rank == chosen.victim else None

    def enters(self, phase: str, number: int = STRUCK_ROUND) -> None:
        """Take note that the program enters a phase, and strike if this is the one."""
        chosen = self._chosen
        if chosen is not None and phase == chosen.phase and number == STRUCK_ROUND:
            chosen.note.write_text(phase)
            ACTS[chosen.act](chosen.delay)


striker = Striker()


def square(x):
    return x * x


def square_or_be_struck(x, number):
    striker.enters("served", number)
    return x * x


def make_params(rank):
    return jnp.full(3 + rank, 1.0 + rank)


def weigh(params, x):
    return params * x


def make_offset(rank):
    return jnp.float32(rank)


def shift(offset, x):
    return x + offset


def mean_difference(output, target):
    return jnp.mean(output - target)


def right(what: str, found: object, expected: object) -> None:
    if not np.array_equal(np.asarray(found), np.asarray(expected)):
        print(f"{WRONG} {what}: {found}, not {expected}", file=sys.stderr, flush=True)


class Load:
    """The load of one rank. Its parameters are on the next rank."""

    def __init__(self, rank: int, size: int, timeout: float):
        self.rank, self.size, self.peer = rank, size, (rank + 1) % size
        self.params = jd.remote(self.peer, make_params, args=(rank,))
        self.optimizer = jd.DistributedOptimizer(optax.sgd(RATE), [self.params])
        self.parallel = jd.DataParallel(timeout=timeout)
        offsets = [jd.remote(one, make_offset, args=(one,)) for one in range(size)]
        stages = [(shift, offset) for offset in offsets]
        self.pipeline = jd.Pipeline(stages, jd.pipeline.one_f_one_b(size, 4), loss=mean_difference, timeout=timeout)
        self.averages = {"average": self.parallel.average, "compiled average": jax.jit(self.parallel.average)}

    def round(self, number: int) -> None:
        x = jnp.arange(3.0 + self.rank) + number
        striker.enters("call", number)
        right("call", jd.rpc_sync(self.peer, square, args=(x,)), x * x)
        right("served", jd.rpc_sync(self.peer, square_or_be_struck, args=(x, number)), x * x)
        gradient = self.differentiate(x, number)
        for phase, average in self.averages.items():
            self.average(phase, average, number)
        striker.enters("update", number)
        self.optimizer.step(gradient)
        self.step_in_stages(number)
        striker.enters("idle", number)
        time.sleep(0.02)

    def step_in_stages(self, number):
        striker.enters("pipeline", number)
        x = np.full((8, 2), number, np.float32)
        with jd.context():
            right("pipeline", self.pipeline.step(x, targets=0 * x), number + self.size * (self.size - 1) / 2)

    def differentiate(self, x, number):
        def loss(params):
            striker.enters("recording", number)
            weighed = jd.rpc_sync(self.peer, weigh, args=(params, x))
            striker.enters("pullback", number)
            return weighed.sum()

        value, gradient = jd.value_and_grad(loss)(self.params)
        steps = [np.arange(3.0 + self.rank) + k for k in range(number)]
        expected = 1.0 + self.rank - RATE * sum(steps, np.zeros(3 + self.rank))
        right("loss", value, (expected * np.asarray(x)).sum())
        return gradient

    def average(self, phase, average, number):
        striker.enters(phase, number)
        found = average({"small": jnp.full(3, float(self.rank)), "large": jnp.full(1 << 18, float(number * self.rank))})
        mean = (self.size - 1) / 2
        right(phase, found["small"], np.full(3, mean))
        right(phase, found["large"], np.full(1 << 18, number * mean))


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--victim", type=int, required=True)
    parser.add_argument("--phase", choices=PHASES, required=True)
    parser.add_argument("--act", choices=ACTS, required=True)
    parser.add_argument("--delay", type=float, required=True, help="seconds after the beginning of the phase")
    parser.add_argument("--timeout", type=float, default=60.0, help="of calls and averages")
    parser.add_argument("--note", type=pathlib.Path, required=True)
    return parser.parse_args(arguments)


def main(timeout: float) -> None:
    striker.enters("init")
    me = jd.init(timeout=timeout)
    load = Load(me.rank, jd.world_size(), timeout)
    for number in range(ROUNDS):
        load.round(number)
    striker.enters("shutdown")
    jd.shutdown(timeout=2 * timeout)


if __name__ == "__main__":
    import faults.load  # the module that other ranks find functions in

    chosen = options()
    faults.load.striker = Striker(chosen, launcher_env.rank())
    faults.load.main(chosen.timeout)
