"""The device of each worker: a GPU of the node for each process, a device of the process for each local worker."""

import ctypes
import logging
import os
import pathlib
from collections.abc import Sequence

import jax

from jdistgrad._compat import backends_are_initialized, configured

log = logging.getLogger("jdistgrad")

# The kernel driver lists the node's GPUs here, so that no library has to be loaded to count them.
NVIDIA = pathlib.Path("/proc/driver/nvidia/gpus")

# How much of a GPU's memory JAX takes at its start, by default three quarters; of two processes the second finds too
# little for XLA's libraries.
MEMORY = 0.75
SHARE_OF_MEMORY = "XLA_CLIENT_MEM_FRACTION"
CHOICES_OF_MEMORY = (
    SHARE_OF_MEMORY,
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)

# XLA times variants of a program on the GPU while it compiles. Meanwhile no other program of the process may run, so a
# program that waits for the answer of a worker that compiles would never end.
TUNING = "--xla_gpu_autotune_level"


def visible_gpus() -> list[str]:
    """Return the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES spells them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in range(len(list(NVIDIA.iterdir())))] if NVIDIA.is_dir() else []


def opened_gpus() -> list[str]:
    """Return the CUDA devices that JAX opens in this process, as CUDA_VISIBLE_DEVICES spells them."""
    gpus, chosen = visible_gpus(), configured("jax_cuda_visible_devices")
    return gpus if chosen == "all" else [gpus[int(number)] for number in chosen.split(",") if int(number) < len(gpus)]


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


def card_to_share() -> str:
    """Return the id of the GPU that JAX will open in this process; "" if nothing is known of it or to be said."""
    platforms, chosen = configured("jax_platforms") or "cuda", configured("jax_cuda_visible_devices")
    if backends_are_initialized() or len(opened_gpus()) != 1 or not {"cuda", "gpu"} & set(platforms.split(",")):
        return ""
    if any(choice in os.environ for choice in CHOICES_OF_MEMORY):
        return ""
    return cuda_uuid(0 if chosen == "all" else int(chosen))


def share_memory(card: str, cards: Sequence[str]) -> None:
    """Have JAX take this process's part only of the memory of a GPU that several processes of the job open.

    Arguments:
      card: this process's, see ``card_to_share``.
      cards: those of all processes.
    """
    if card and cards.count(card) > 1:
        os.environ[SHARE_OF_MEMORY] = f"{MEMORY / cards.count(card):.4f}"


def cuda_uuid(number: int) -> str:
    """Return the id of a GPU of this process, or "" if CUDA's driver does not have the id.

    Positions in CUDA_VISIBLE_DEVICES do not identify GPUs: each process may see its own as the only one, number 0.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number)
        failed = failed or driver.cuDeviceGetUuid(uuid, device)
    except (OSError, AttributeError):  # no driver, or one without this function
        return ""
    return "" if failed else bytes(uuid).hex()


def compile_beside_waiting_programs() -> None:
    """Let workers of this process compile for its GPU while programs of others wait, unless the user has set TUNING."""
    flags = os.environ.get("XLA_FLAGS", "")
    if TUNING in flags:
        return
    if not backends_are_initialized():
        if visible_gpus():
            os.environ["XLA_FLAGS"] = f"{flags} {TUNING}=0".strip()
    elif jax.default_backend() == "gpu":
        log.warning(
            "the workers of this process share a GPU that JAX has opened before them. A compiled program that waits "
            "for a worker that compiles may wait for ever: set XLA_FLAGS=%s=0 before you start Python, or open the "
            "workers before the first array.",
            TUNING,
        )
