"""Who has a rank's place in a job, by the environment that processes inherit from each other."""

import os

import pytest

from jdistgrad.wire import launcher_env

PARENT = 4711


@pytest.fixture
def rank(monkeypatch):
    """Let this process be one that rank 1 of a job has started, with all of its environment."""
    for name in [name for name in os.environ if name.startswith(launcher_env.OF_A_JOB)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv(launcher_env.PLACE, "[null, null, null]")
    return monkeypatch


def test_a_place_is_free_or_ones_own(rank):
    rank.delenv(launcher_env.PLACE)
    assert launcher_env.place_taken_by() is None
    launcher_env.take_place()
    assert launcher_env.place_taken_by() is None
    assert launcher_env.PLACE in os.environ
    assert launcher_env.PLACE not in launcher_env.outside_the_job()


@pytest.mark.parametrize("job", [{}, {"PMIX_NAMESPACE": "a"}, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}])
@pytest.mark.parametrize("another", [{"PMIX_NAMESPACE": "b"}, {"PMI_RANK": "2"}])
def test_a_child_finds_the_place_taken_unless_it_is_of_another_job(rank, job, another):
    for name, value in job.items():
        rank.setenv(name, value)
    rank.setattr(os, "getpid", lambda: PARENT)
    launcher_env.take_place()
    rank.setattr(os, "getpid", lambda: PARENT + 1)
    assert launcher_env.place_taken_by() == PARENT
    for name, value in another.items():
        rank.setenv(name, value)
    assert launcher_env.place_taken_by() is None


def test_what_is_started_outside_the_job_keeps_the_settings_of_mpi_alone(monkeypatch):
    of_a_job = ["OMPI_COMM_WORLD_RANK", "PMIX_ID", "PMI_RANK", "SLURM_JOB_ID"]
    of_open_mpi_4 = ["OMPI_MCA_orte_local_daemon_uri", "OMPI_MCA_ess", "OMPI_MCA_ess_base_vpid", "OMPI_MCA_pmix"]
    settings = ["OMPI_MCA_btl", "PMIX_MCA_gds", "OPAL_PREFIX"]
    for name in (*of_a_job, *of_open_mpi_4, *settings):
        monkeypatch.setenv(name, "1")
    assert {*of_a_job, *of_open_mpi_4, *settings} & {*launcher_env.outside_the_job()} == {*settings}


@pytest.mark.parametrize(
    ("said", "started"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "3", "SLURM_STEP_NUM_TASKS": "2"}, 3),  # mpirun starts its own processes by srun
        ({"PMI_SIZE": "4"}, 4),
        ({"SLURM_STEP_NUM_TASKS": "5", "SLURM_NTASKS": "8"}, 5),
        ({"SLURM_NTASKS": "8"}, 1),  # in a batch script, which is one process
        ({"SLURM_STEP_NUM_TASKS": "?"}, 1),
    ],
)
def test_launchers_say_how_many_processes_they_have_started(rank, said, started):
    rank.delenv("PMI_RANK")
    for name, value in said.items():
        rank.setenv(name, value)
    assert launcher_env.started_processes()[1] == started
    assert launcher_env.launched() == (started > 1)
