"""The device of each worker: a GPU of the node for each process, a device of the process for each local worker."""

import os
import pathlib

import jax
import numpy as np

from jdistgrad._compat import backends_are_initialized, configured

# The kernel driver lists the node's GPUs here, so that no library has to be loaded to count them.
NVIDIA = pathlib.Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> list[str]:
    """Return the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES spells them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in range(len(list(NVIDIA.iterdir())))] if NVIDIA.is_dir() else []


def take_process_device(local_rank: int) -> None:
    """Give this process one GPU of its node, before JAX takes memory on all of them.

    A user's choice (``jax_cuda_visible_devices``, ``JAX_PLATFORMS=cpu``) stands. If JAX has opened its devices already,
    only the default device can still be chosen.
    """
    if backends_are_initialized():
        devices = jax.local_devices()
        if len(devices) > 1 and configured("jax_default_device") is None:
            jax.config.update("jax_default_device", devices[local_rank % len(devices)])
        return
    gpus = visible_gpus()
    if len(gpus) > 1 and configured("jax_cuda_visible_devices") == "all":
        jax.config.update("jax_cuda_visible_devices", str(local_rank % len(gpus)))


def device_of_local_worker(rank: int) -> jax.Device | None:
    """Return the device of a worker that shares its process with others, or None if the process has only one device."""
    devices = jax.local_devices()
    return devices[rank % len(devices)] if len(devices) > 1 else None


def finish_programs_of_this_thread() -> None:
    """Wait until the programs that this thread has called have run."""
    _last(np.float32(0)).block_until_ready()


_last = jax.jit(lambda number: number)
