"""What only a GPU can show: copies to the host, one-device meshes, ranks that share a GPU, calls with device arrays.

    python benchmarks/gpu/table.py            # make bench-gpu

Needs one NVIDIA GPU or more; with two or more, steps over all of them too. Without a GPU the same jobs run on CPU
devices with small arrays, which shows that they work and nothing else. With
``JDISTGRAD_COLLECTIVES=mpi-on-device``, and the MPI that this needs, averages where the arrays lie are measured too.
"""

import pathlib
import platform
import statistics
import sys

import jax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import ROWS, ended, microseconds, milliseconds, options, ratio, row, run_job, section

from jdistgrad.rpc.devices import visible_gpus

JOBS = pathlib.Path(__file__).parent / "jobs"


def repeated(job, n, rounds):
    """Return each figure of a job, one value per run."""
    found = {}
    for _ in range(rounds):
        for figure, value in run_job(str(JOBS / f"{job}.py"), n=n).items():
            found.setdefault(figure, []).append(value)
    return found


def rate(seconds, nbytes):
    return f"{statistics.median(nbytes) / statistics.median(seconds) / 1e9:.1f} GB/s"


def alone(found):
    nbytes = found["bytes"]
    size = f"{nbytes[0] / 2**20:.0f} MiB"
    for key, what in (("to_host", "to pinned host memory"), ("to_device", "back to the device")):
        row(f"{size} {what}", rate(found[key], nbytes), "", "", ">= 15 GB/s")
    row(f"{size} by np.asarray", rate(found["to_numpy"], nbytes), "", "", "")
    for key, what in (("mesh", "on a mesh of one"), ("devices", "over Devices of one rank")):
        times = ratio(found[key], found["plain"])
        row(
            f"a step {what}", milliseconds(found[key]), f"jit {milliseconds(found['plain'])}", f"{times:.2f}", "<= 1.02"
        )


def pair(found):
    row("round trip of 4 B on a device", microseconds(found["small"]), "", "", "")
    row(f"round trip of {found['large_bytes'][0] / 2**20:.0f} MiB", milliseconds(found["large"]), "", "", "")
    row("the note's loop", microseconds(found["note"]), "", "", "")
    pairs = zip(found["step"], found["local"], found["reduction"], strict=True)
    hidden = statistics.median(1 - max(0.0, step - local) / reduction for step, local, reduction in pairs)
    row("two ranks, MPI: share of the reduction hidden", f"{hidden:.2f}", "", "", ">= 0.8")
    local = f"local {milliseconds(found['local'])}"
    for step, reduction, what in (
        ("step", "reduction", "from Python"),
        ("compiled_step", "compiled_reduction", "in jax.jit"),
        ("on_device_step", "on_device_reduction", "in jax.jit, on_device=True"),
    ):
        if step in found:
            row(f"    a step {what}", milliseconds(found[step]), local, "", "")
            row(f"    the average alone, {what}", milliseconds(found[reduction]), "", "", "")


def mapped(found):
    """Print round trips before and after the shared memory was registered with the devices."""
    refused = next((why for why in found["refused"] if why), "")
    size = f"{found['large_bytes'][0] / 2**20:.0f} MiB"
    for key, what in (("small", "4 B on a device"), ("large", size)):
        times = ratio(found[f"{key}_mapped"], found[key])
        other = f"without {milliseconds(found[key])}"
        after = milliseconds(found[f"{key}_mapped"])
        row(f"round trip of {what}, shared memory mapped", after, other, f"{times:.2f}", "")
    if refused:
        print(f"the memory was not mapped: {refused}")


def spanning(found, n):
    by_hand = ratio(found["devices"], found["hand"])
    other = f"by hand {milliseconds(found['hand'])}"
    row(f"a step over {n} devices", milliseconds(found["devices"]), other, f"{by_hand:.2f}", "<= 1.05")
    row("    in host memory", milliseconds(found["devices"]), f"MPI {milliseconds(found['mpi'])}", "", "")


def main():
    chosen = options(__doc__)
    gpus = len(visible_gpus())
    where = f"{gpus} GPUs" if gpus else "CPU devices: these figures mean nothing"
    about = f"{where}; jax {jax.__version__}, Python {platform.python_version()}; medians of {chosen.rounds} jobs"
    with section(f"one rank, {about}"):
        alone(repeated("alone", 1, chosen.rounds))
    with section(f"two ranks, {about}"):
        pair(repeated("pair", 2, chosen.rounds))
        mapped(repeated("mapped", 2, chosen.rounds))
    if gpus != 1:
        ranks = gpus or 2
        with section(f"{ranks} ranks over devices, {about}"):
            spanning(repeated("spanning", ranks, chosen.rounds), ranks)
    print(f"{len(ROWS)} rows")
    ended()


if __name__ == "__main__":
    main()
