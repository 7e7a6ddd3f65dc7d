"""Job of calls.py: rank 0 measures calls to rank 1 with jdistgrad."""

import gc
import os
import pathlib
import statistics
import sys
import time

import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import SHORT, few, median, pipelined, report, times

import jdistgrad as jd
from jdistgrad.rpc.worker import current_worker

CALLS = 50 * few(2000)


def echo(x):
    return x


def round_trip(name, array):
    found = times(lambda: jd.rpc_sync(1, echo, args=(array,)), 3000)
    return {f"small_{name}": statistics.median(found), f"small_{name}_mean": statistics.mean(found)}


def in_flight(array):
    return pipelined(lambda: jd.rpc_async(1, echo, args=(array,)), lambda future: future.result(), 3000)


def cpu_seconds():
    return time.process_time()


def idle_share(seconds):
    before = jd.rpc_sync(1, cpu_seconds)
    time.sleep(seconds)
    return (jd.rpc_sync(1, cpu_seconds) - before) / seconds


def resident_mib():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def owned():
    return len(current_worker().references.owned.entries)


def call_and_refer(count):
    for _ in range(count // 100):
        for future in [jd.rpc_async(1, echo, args=(k,)) for k in range(100)]:
            future.result()
        for rref in [jd.remote(1, echo, args=(k,)) for k in range(100)]:
            rref.to_here()


def growth():
    """Return the memory growth over CALLS calls and references, in MiB on the worse rank, and what rank 1 then owns.

    A tenth as many calls and references come before, to warm up.
    """
    call_and_refer(CALLS // 10)
    before = resident_mib(), jd.rpc_sync(1, resident_mib)
    call_and_refer(CALLS)
    after = resident_mib(), jd.rpc_sync(1, resident_mib)
    time.sleep(0.1)
    return max(b - a for a, b in zip(before, after, strict=True)), jd.rpc_sync(1, owned)


def measure():
    large = jnp.ones(16 << 20, jnp.float32)
    report(
        **round_trip("numpy", np.ones(1, np.float32)),
        **round_trip("jax", jnp.ones(1, jnp.float32)),
        rate_numpy=in_flight(np.ones(1, np.float32)),
        rate_jax=in_flight(jnp.ones(1, jnp.float32)),
        large=median(lambda: jd.rpc_sync(1, echo, args=(large,)), 15),
    )
    if SHORT or "--long" in os.environ.get("JDISTGRAD_BENCH", ""):
        grown, left = growth()
        report(idle=idle_share(0.1 * few(50)), growth=grown, owned=left)


def main():
    me = jd.init()
    if me.rank == 0:
        measure()
    jd.shutdown()


if __name__ == "__main__":
    main()
