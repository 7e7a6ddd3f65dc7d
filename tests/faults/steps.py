"""Ranks that do different things: other numbers of steps, other orders of objects, other operations.

As a program, this is what the ranks of such a job do. The job ends, so that each fault is a job of its own.
"""

import argparse
import pathlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd
from faults import jobs, load
from faults.outcomes import HUNG, NAMED, SURVIVED, WRONG, Outcome

SIZE, TIMEOUT, LENGTH = 3, 5.0, 5
LIMIT = 90.0
OPERATIONS = ("average a", "average b", "compiled a", "broadcast a", "verify b", "sum", "barrier")
TOLD = "DisagreementError", "MissingRanksError", "WorkerLostError", "will not come", "entered this collective"


def sequences(seed: int) -> list[list[str]]:
    """Return what each rank does: the same, or one rank does one thing more, less or otherwise."""
    chance = random.Random(seed)
    common = [chance.choice(OPERATIONS) for _ in range(LENGTH)]
    found = [list(common) for _ in range(SIZE)]
    odd, place = found[chance.randrange(SIZE)], chance.randrange(1, LENGTH)
    change = chance.choice(["none", "less", "more", "other", "swapped"])
    if change == "less":
        del odd[place]
    elif change == "more":
        odd.insert(place, chance.choice(OPERATIONS))
    elif change == "other":
        odd[place] = chance.choice(OPERATIONS)
    elif change == "swapped":
        odd[place - 1], odd[place] = odd[place], odd[place - 1]
    return found


def operations(rank: int, size: int) -> dict[str, Callable[[], object]]:
    """Return the operations; each returns the mean of the ranks' numbers."""
    a, b = (jd.DataParallel(timeout=TIMEOUT) for _ in range(2))
    group, compiled = jd.collectives.of_this_world(), jax.jit(a.average)
    mine, mean = {"w": jnp.full(5, float(rank))}, np.full(5, (size - 1) / 2)
    same = {"w": jnp.ones(5)}
    return {
        "average a": lambda: a.average(mine)["w"],
        "average b": lambda: b.average(mine)["w"],
        "compiled a": lambda: compiled(mine)["w"],
        "broadcast a": lambda: a.broadcast(mine)["w"] + mean,
        "verify b": lambda: b.verify(same) or mean,
        "sum": lambda: group.allreduce(mine["w"]) / size,
        "barrier": lambda: group.barrier() or mean,
    }


def run(seed: int) -> None:
    me = jd.init(timeout=30)
    known = operations(me.rank, jd.world_size())
    for name in sequences(seed)[me.rank]:
        load.right(name, known[name](), np.full(5, (SIZE - 1) / 2))
    jd.shutdown(timeout=4 * TIMEOUT)


def differing(count: int, seed: int) -> Iterator[Outcome]:
    """Ranks with different steps."""
    for number in range(seed, seed + count):
        todo = sequences(number)
        ended = jobs.run(SIZE, ["-m", "faults.steps", "--seed", str(number)], limit=LIMIT, settings={})
        yield judge(ended, todo, f"-m faults.steps --seed {number}: {' | '.join(map(', '.join, todo))}")


def judge(ended: jobs.Ended, todo: Sequence[Sequence[str]], fault: str) -> Outcome:
    differs = any(each != todo[0] for each in todo)
    if ended.status is None:
        return Outcome(HUNG, fault, ended.output[-4000:])
    if load.WRONG in ended.output or ended.left or (ended.status == 0) == differs:
        return Outcome(WRONG, fault, f"status {ended.status}, left {ended.left}\n{ended.output[-4000:]}")
    if differs and not any(text in ended.output for text in TOLD):
        return Outcome(WRONG, fault, f"nothing says what differs\n{ended.output[-4000:]}")
    return Outcome(NAMED if differs else SURVIVED, fault)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--note", type=pathlib.Path, help="not used: no rank is struck")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(options(sys.argv[1:]).seed)
