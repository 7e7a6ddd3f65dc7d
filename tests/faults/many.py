"""Many ranks on few cores: they start, call in a ring, take data-parallel steps, and shut down."""

import argparse
import pathlib
import resource
import sys
import time
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

import jdistgrad as jd
from faults import jobs, load
from faults.outcomes import HUNG, SURVIVED, WRONG, Outcome

SIZES = (8, 16, 32, 64)
LIMIT = 600.0
CALLS, STEPS = 20, 5
REPORT = "many ranks:"


def plus(x, y):
    return x + y


def run() -> None:
    start = time.monotonic()
    me = jd.init(timeout=LIMIT)
    size, begun = jd.world_size(), time.monotonic()
    for k in range(CALLS):
        load.right("call", jd.rpc_sync((me.rank + 1) % size, plus, args=(jnp.arange(3.0), k)), jnp.arange(3.0) + k)
    called, dp = time.monotonic(), jd.DataParallel(timeout=LIMIT)
    for number in range(STEPS):
        found = dp.average({"w": jnp.full(1000 + number, float(me.rank))})["w"]
        load.right("average", found, jnp.full(1000 + number, (size - 1) / 2))
    stepped = time.monotonic()
    jd.shutdown(timeout=LIMIT)
    if me.rank == 0:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{REPORT} {size}: init {begun - start:.1f} s, {CALLS} calls of each rank to the next "
            f"{called - begun:.1f} s, {STEPS} averages {stepped - called:.1f} s, "
            f"shutdown {time.monotonic() - stepped:.1f} s, {used:.0f} MiB each"
        )


def together(count: int, seed: int) -> Iterator[Outcome]:
    """Jobs of many ranks."""
    for size in SIZES[:count]:
        ended = jobs.run(size, ["-m", "faults.many"], limit=LIMIT, settings={})
        fault = next((line for line in ended.output.splitlines() if line.startswith(REPORT)), f"{size} ranks")
        if ended.status == 0 and load.WRONG not in ended.output and not ended.left:
            print(fault, flush=True)
            yield Outcome(SURVIVED, fault)
        else:
            kind = HUNG if ended.status is None else WRONG
            yield Outcome(kind, fault, f"status {ended.status}, left {ended.left}\n{ended.output[-4000:]}")


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--note", type=pathlib.Path, help="not used: no rank is struck")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options(sys.argv[1:])
    run()
