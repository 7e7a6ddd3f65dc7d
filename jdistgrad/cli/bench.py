"""`jdistgrad bench`: time calls, gradients and reductions on this machine, next to a reference."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd
from jdistgrad.cli import launch
from jdistgrad.cli.programs import check_workers
from jdistgrad.errors import LauncherError

Times = dict[str, float]

MARK = "jdistgrad bench: "  # before the numbers, among what mpirun prints


# The reference times, in seconds, of threads and of processes: the best of seven runs.
MACHINE = "two cores of a virtual machine, Linux, Python 3.11, jax 0.10.2, Open MPI 5.0.11; 2026-11-21"
REFERENCE = {
    "call, 4 bytes": (60e-6, 103e-6),
    "call, 16 MiB": (58e-6, 3500e-6),
    "32 calls in flight": (1040e-6, 855e-6),
    "gradient, jd.jit": (318e-6, 488e-6),
    "gradient, eager": (1880e-6, 2590e-6),
    "average, 4 MiB": (1120e-6, 1010e-6),
}


def echo(x: Any) -> Any:
    return x


@jax.jit
def add(a: Any, b: Any) -> Any:
    return a + b


def loss_fn(a: Any, b: Any, to: int) -> Any:
    return jnp.sum(jd.rpc_sync(to, add, args=(a, b)) * b)


def median(action: Callable[[], Any], runs: int = 100) -> float:
    """Return the median seconds of an action, after three warm-up runs."""
    taken: list[float] = []
    for _ in range(3 + runs):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:])


def calls(to: int) -> Times:
    """Measure round trips to a worker."""

    def many() -> None:
        for future in [jd.rpc_async(to, echo, args=(k,)) for k in range(32)]:
            future.result()

    small, large = jnp.ones(1), np.ones(16 << 18, np.float32)
    return {
        "call, 4 bytes": median(lambda: jax.block_until_ready(jd.rpc_sync(to, echo, args=(small,)))),
        "call, 16 MiB": median(lambda: jd.rpc_sync(to, echo, args=(large,))),
        "32 calls in flight": median(many),
    }


def gradients(to: int) -> Times:
    """Measure a loss with one call, and its gradient."""
    a, b = jnp.ones((3, 3)), jnp.full((3, 3), 2.0)
    eager = jd.value_and_grad(lambda a, b: loss_fn(a, b, to), argnums=(0, 1))
    staged = jd.jit(eager)

    def run(step: Callable[..., Any]) -> None:
        with jd.context():
            jax.block_until_ready(step(a, b))

    return {"gradient, jd.jit": median(lambda: run(staged)), "gradient, eager": median(lambda: run(eager))}


def reduction() -> Times:
    """Measure the average of 4 MiB of gradients over all ranks. Every rank must call it."""
    dp, tree = jd.DataParallel(), {"w": jnp.ones((1024, 1024))}
    return {"average, 4 MiB": median(lambda: jax.block_until_ready(dp.average(tree)), runs=12)}


def measure() -> Times:
    """Measure everything; every worker must call it. Calls have their own world, where the others only serve."""
    me = jd.init()
    peer = jd.world_size() - 1
    found = {**calls(peer), **gradients(peer)} if me.rank == 0 else {}
    jd.shutdown()
    jd.init()
    found |= reduction()
    jd.shutdown()
    return found


def of_a_job(n: int) -> Times:
    command = launch.command(n, ["-m", "jdistgrad.cli.bench"])
    done = launch.attend(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise LauncherError(f"the job of {n} ranks failed; `jdistgrad doctor` may show why:\n{done.stderr.strip()}")
    return json.loads(lines[0].removeprefix(MARK))


def table(title: str, found: Mapping[str, float], kind: int) -> str:
    lines = [f"{title:<36}{'here':>12}{'reference':>12}{'ratio':>8}"]
    for what, seconds in found.items():
        known = REFERENCE[what][kind]
        lines.append(f"  {what:<34}{spell(seconds):>12}{spell(known):>12}{seconds / known:>8.2f}")
    return "\n".join(lines)


def spell(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def main(n: int) -> int:
    """Measure a local world, and an MPI job if there is an MPI. Return the exit status."""
    check_workers(n)
    print(table(f"{n} threads of one process", jd.spawn(measure, n)[0], 0), flush=True)
    try:
        print(table(f"{n} processes under mpirun", of_a_job(n), 1))
    except LauncherError as error:
        print(f"jdistgrad bench: no job was measured: {error}", file=sys.stderr)
        return 1
    finally:
        print(f"The reference is of 2 workers on {MACHINE}.")
    return 0


if __name__ == "__main__":
    numbers = measure()
    if "call, 4 bytes" in numbers:
        print(MARK + json.dumps(numbers), flush=True)
