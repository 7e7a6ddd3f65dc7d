"""The program of data-parallel jobs that survive: ranks train, some are killed, and the others go on.

At the end the survivors take the steps since the last loss again, in a new group that never had the dead in it, from
the parameters at that time: each step must give the same bits. Each prints a line of JSON.
"""

import dataclasses
import faulthandler
import hashlib
import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd
from faults import survivors_load

TO_END = 20.0
ROWS = (3, 5, 2, 7, 4, 6, 1, 8, 9, 3)


@dataclasses.dataclass
class Report:
    """What a survivor has seen. ``digests``: the parameters after each step; ``sizes``: of how many ranks it was."""

    sizes: list[int] = dataclasses.field(default_factory=list)
    digests: list[str] = dataclasses.field(default_factory=list)
    ended: list[float] = dataclasses.field(default_factory=list)
    again: list[str] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)


def loss(params: Any, batch: jax.Array) -> jax.Array:
    hidden = jnp.tanh(batch @ params["first"] + params["bias"])
    return ((hidden @ params["second"]) ** 2).mean() + 0.01 * (params["scale"] ** 2).sum()


def first_params() -> Any:
    drawn = np.random.default_rng(7)
    shapes = {"first": (40, 300), "bias": (300,), "second": (300, 11), "scale": (5, 3)}
    return {name: jnp.asarray(drawn.normal(size=shape) / 10, jnp.float32) for name, shape in shapes.items()}


def batch_of(rank: int, number: int) -> jax.Array:
    drawn = np.random.default_rng([rank, number])
    return jnp.asarray(drawn.normal(size=(ROWS[rank], 40)), jnp.float32)


def updated(params: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients)


def digest(params: Any) -> str:
    octets = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
    return hashlib.blake2b(octets, digest_size=6).hexdigest()


class Training:
    """The training of one rank. The settings, which are the same on all ranks, are drawn from the seed."""

    def __init__(self, rank: int, seed: int):
        chance = random.Random(seed)
        self.rank, self.report, self.kept = rank, Report(), list[Any]()
        self.settings: dict[str, Any] = {
            "bucket_cap_mb": chance.choice([0.01, 25]),
            "overlap": chance.random() < 0.5,
            "find_unused_parameters": chance.random() < 0.3,
            "check_finite": chance.random() < 0.3,
        }

    def run(self, seconds: float, victims: Mapping[int, float]) -> None:
        """Train until a rank's time is over, and a step without the victims, each killed at its moment, is done."""
        dp, params = jd.DataParallel(timeout=TO_END, **self.settings), first_params()
        step = dp.value_and_grad(loss)
        digest(self.take(step, params, 0))  # nothing is compiled from now on
        dp.mean({"over": 0.0})
        end, left = time.monotonic() + seconds, jd.world_size() - len(victims)
        if self.rank in victims:
            threading.Timer(victims[self.rank], survivors_load.strike).start()
        over = 0.0
        while not over:
            self.kept.append(params)
            params = self.take(step, params, len(self.kept))
            self.report.sizes.append(dp.statistics().size)
            self.report.digests.append(digest(params))
            self.report.ended.append(time.time())
            over = dp.mean({"over": float(time.monotonic() > end and self.report.sizes[-1] == left)})["over"]
        dp.verify(params)

    def take(self, step: Any, params: Any, number: int) -> Any:
        _, gradients = step(params, batch_of(self.rank, number))
        return updated(params, gradients)

    def run_again(self, others: Sequence[int]) -> None:
        """Take the steps since the last loss again, from the parameters at that time, without the dead."""
        report = self.report
        dp = jd.DataParallel(jd.collectives.of_this_world(others), timeout=TO_END, **self.settings)
        step = dp.value_and_grad(loss)
        begin = report.sizes.index(report.sizes[-1])
        params = self.kept[begin]
        for number in range(begin, len(report.sizes)):
            params = self.take(step, params, number + 1)
            report.again.append(digest(params))


def main() -> None:
    chosen = survivors_load.options()
    me = jd.init("peer{rank}")
    faulthandler.dump_traceback_later(TO_END)
    training = Training(me.rank, chosen.seed)
    training.run(chosen.seconds, dict(zip(chosen.victims, chosen.after, strict=True)))
    training.run_again([rank for rank in range(jd.world_size()) if rank not in chosen.victims])
    training.report.left = jd.shutdown(timeout=TO_END)
    print(f"{survivors_load.SURVIVOR}{json.dumps([me.rank, dataclasses.asdict(training.report)])}", flush=True)


if __name__ == "__main__":
    main()
