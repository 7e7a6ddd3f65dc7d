"""Benchmark of calls in a local world: their time, and a check that nothing is copied.

python benchmarks/local.py            # make bench
"""

import statistics

import jax.numpy as jnp
from measure import ended, median, options, row, section

import jdistgrad as jd


def main(chosen):
    with section("calls in a local world"), jd.local_workers(2):
        for name, n in (("4 B", 1), ("64 MiB", 16 << 20)):
            array = jnp.ones(n, jnp.float32)
            medians = [median(lambda array=array: jd.rpc_sync(1, lambda x: x, args=(array,)), 1000) for _ in range(9)]
            row(f"local world, round trip of {name}", f"{statistics.median(medians) * 1e6:.0f} us", "", "", "<= 60 us")
        same = jd.rpc_sync(1, lambda x: x, args=(array,)) is array
        row("local world, the very same array comes back", "yes" if same else "no", "", "", "no copy")


if __name__ == "__main__":
    main(options(__doc__))
    ended()
