"""Pipelines with a stage that raises, stands still or gives a shape that does not fit, and contexts that are closed."""

import functools
import random
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd
from faults.outcomes import Outcome, patience
from faults.program import driven, judged
from jdistgrad import pipeline as pp

STAGES, MICROBATCHES, WIDTH = 3, 4, 4
GOOD_ROWS, BAD_ROWS = 2, 3  # of a microbatch: functions are traced again for another number
KNOWN_SECONDS = 1.0
TIMEOUT = 0.5

_go_on = threading.Event()


def make(width):
    return jnp.ones((width, width))


def multiply(params, x):
    return jnp.tanh(x @ params / WIDTH)


def mean(output, target):
    return jnp.mean(output - target)


def raises(params, x):
    if len(x) == BAD_ROWS:
        raise RuntimeError("a stage broke")
    return multiply(params, x)


@jax.custom_vjp
def broken_backwards(x):
    return x


def _rule(_, cotangent):
    if len(cotangent) == BAD_ROWS:
        raise RuntimeError("a stage broke")
    return (cotangent,)


broken_backwards.defvjp(lambda x: (x, None), _rule)


def raises_backwards(params, x):
    return broken_backwards(multiply(params, x))


def raise_for(rows, gradient):
    if rows == BAD_ROWS:
        raise RuntimeError("a stage broke")
    return gradient


@jax.custom_vjp
def broken_weights(params, x):
    return params


def _weights_rule(rows, cotangent):
    like = jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype)
    return jax.pure_callback(functools.partial(raise_for, len(rows)), like, cotangent), jnp.zeros_like(rows)


broken_weights.defvjp(lambda params, x: (params, x), _weights_rule)


def raises_in_weights(params, x):
    """Raise while the second half of the backward pass runs, which computes the gradients of parameters."""
    return multiply(broken_weights(params, x), x)


def stands_still(params, x):
    if len(x) == BAD_ROWS:
        _go_on.wait(60)
        raise RuntimeError("a stage stood still")  # what is traced is not kept: the next stands still again
    return multiply(params, x)


def misfits(params, x):
    return multiply(params, x)[:, : WIDTH - 1] if len(x) == BAD_ROWS else multiply(params, x)


def go_on(free):
    (_go_on.set if free else _go_on.clear)()


FAULTS = {
    raises: "a stage broke",
    raises_backwards: "a stage broke",
    raises_in_weights: "a stage broke",
    misfits: "",
    stands_still: "not answered within",
}


def play(chance: random.Random, count: int) -> Iterator[Outcome]:
    return driven(count, lambda: broken_steps(chance, count))


def broken_steps(chance: random.Random, count: int) -> Iterator[Outcome]:
    session = Session()
    for _ in range(count):
        yield session.broken(chance)


class Session:
    """Pipelines of three stages on three workers, with every order and every broken stage."""

    def __init__(self):
        self.refs = [jd.remote(rank, make, args=(WIDTH,)) for rank in range(STAGES)]
        self.orders = [make_order(STAGES, MICROBATCHES) for make_order in (pp.gpipe, pp.one_f_one_b, pp.zero_bubble)]
        self.expected = float(np.tanh(np.tanh(np.tanh(1.0))))

    def step(self, function, stage, schedule, rows, timeout=None):
        functions = [multiply] * STAGES
        functions[stage] = function
        stages = list(zip(functions, self.refs, strict=True))
        x, y = np.ones((rows * MICROBATCHES, WIDTH), "float32"), np.zeros((rows * MICROBATCHES, WIDTH), "float32")
        with jd.context():
            return float(jd.Pipeline(stages, schedule, loss=mean, timeout=timeout).step(x, targets=y))

    def broken(self, chance):
        function, schedule = chance.choice(list(FAULTS)), chance.choice(self.orders)
        stage = chance.randrange(STAGES - 1 if function is misfits else STAGES)
        still = function is stands_still
        stage = max(stage, 1) if still else stage  # worker 0 would have to end its own wait
        fault = f"{function.__name__}, stage {stage}, {schedule!r}"
        if still:
            jd.rpc_sync(stage, go_on, args=(False,))
        start, problem = time.monotonic(), ""
        try:
            self.step(function, stage, schedule, BAD_ROWS, TIMEOUT * patience() if still else None)
            problem = "the step raised nothing"
        except Exception as error:
            text = f"{error}\n{''.join(getattr(error, '__notes__', []))}"
            blamed = stage + (function is misfits)
            if FAULTS[function] not in text or f"stage {blamed}, microbatch" not in text:
                problem = f"neither cause nor stage {blamed} are named: {text}"
        seconds = time.monotonic() - start
        if still:
            jd.rpc_sync(stage, go_on, args=(True,))
        elif seconds > KNOWN_SECONDS * patience():
            problem = problem or f"known after {seconds:.1f} s"
        found = self.step(function, stage, schedule, GOOD_ROWS)
        if not problem and abs(found - self.expected) > 1e-6:
            problem = f"then {found}, not {self.expected}"
        return judged(fault, problem, named=True)
