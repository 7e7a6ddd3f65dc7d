"""Job of table.py: round trips of device arrays before and after the memory that ranks share is registered (DMA).

``client.dma_map`` pins host memory that the device then reads and writes without a copy in between. CPUs refuse.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
from measure import median, report

import jdistgrad as jd
from jdistgrad.rpc.worker import current_worker


def same(x):
    return x


def map_shared_memory():
    """Register the memory of both ranks with this rank's device; return why not, or an empty text."""
    try:
        for memory in current_worker().transport._memory.others:
            pool = np.frombuffer(memory, np.uint8)
            jax.devices()[0].client.dma_map(pool.ctypes.data, pool.nbytes)
    except (jax.errors.JaxRuntimeError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def round_trips(large):
    small = jnp.ones(1)
    return {
        "small": median(lambda: jd.rpc_sync(1, same, args=(small,)).block_until_ready(), 200),
        "large": median(lambda: jd.rpc_sync(1, same, args=(large,)).block_until_ready(), 10, 3),
    }


def measure():
    large = jnp.ones((64 if jax.default_backend() != "cpu" else 1) << 18)
    found = round_trips(large)
    refused = map_shared_memory() or jd.rpc_sync(1, map_shared_memory)
    mapped = {f"{name}_mapped": seconds for name, seconds in round_trips(large).items()}
    report(**found, **mapped, large_bytes=large.nbytes, refused=refused)


def main():
    me = jd.init()
    if me.rank == 0:
        measure()
    jd.shutdown()


if __name__ == "__main__":
    main()
