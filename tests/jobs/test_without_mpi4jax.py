"""Compiled programs over MPI where mpi4jax is not installed: the suite of collectives passes too."""

import pathlib

from helpers.jobs import output_of

SUITE = pathlib.Path(__file__).parents[1] / "data_parallel" / "test_collectives.py"

WITHOUT = "import sys, pytest; sys.modules['mpi4jax'] = None; sys.exit(pytest.main(sys.argv[1:]))"


def test_collectives_in_programs_need_no_mpi4jax(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # as in worlds of threads, which have compiled most of it
    arguments = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}", str(SUITE)]
    output = output_of(["-m", "jdistgrad", "run", "-n", "3", "-c", WITHOUT, *arguments], timeout=150)
    assert output.count(" passed") == 3
    assert "failed" not in output


def test_ranks_agree_on_whether_they_have_mpi4jax(mpi_job):
    job = mpi_job(
        3,
        """
        import importlib.metadata, os
        import jdistgrad as jd
        if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
            found = importlib.metadata.version
            importlib.metadata.version = lambda package: "none" if package == "mpi4jax" else found(package)
        jd.init()
        """,
    )
    job.expect("the workers disagree on mpi4jax: rank 0 has", "rank 2 has none", status=None)
