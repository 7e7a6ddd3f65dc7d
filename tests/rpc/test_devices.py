"""The choice of a GPU for each process of a node, before JAX opens any; tested in separate processes, without GPUs."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jdistgrad.rpc import devices

TAKE = """
import jax
{before}
from jdistgrad.rpc import devices
devices.take_process_device({rank})
print(jax.config.values["jax_cuda_visible_devices"], getattr(jax.config.values["jax_default_device"], "id", None))
"""


def taken(rank, *, before="", **environment):
    source = TAKE.format(before=before, rank=rank)
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run(
        [sys.executable, "-c", source], env=variables, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.parametrize(("rank", "gpus", "expected"), [(5, "0,1,2,3", "1"), (3, "0", "all")])
def test_each_local_rank_takes_its_gpu(rank, gpus, expected):
    """If there are more ranks than GPUs, several ranks share a GPU."""
    assert taken(rank, CUDA_VISIBLE_DEVICES=gpus) == [expected, "None"]


def test_the_users_choice_stands():
    before = 'jax.config.update("jax_cuda_visible_devices", "3")'
    assert taken(1, before=before, CUDA_VISIBLE_DEVICES="0,1,2,3") == ["3", "None"]


def test_where_jax_runs_already_the_default_device_is_chosen():
    before = 'jax.config.update("jax_num_cpu_devices", 4); jax.devices()'
    assert taken(6, before=before)[1:] == ["2"]


@pytest.mark.parametrize(("value", "expected"), [("", []), ("-1", []), ("4,6", ["4", "6"]), ("GPU-a1", ["GPU-a1"])])
def test_what_the_environment_allows(monkeypatch, value, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert devices.visible_gpus() == expected


def test_without_a_driver_there_are_none(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "NVIDIA", tmp_path / "nothing")
    assert devices.visible_gpus() == []
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    monkeypatch.setattr(devices, "NVIDIA", tmp_path / "gpus")
    assert devices.visible_gpus() == ["0", "1"]


def test_processes_that_share_a_gpu_share_its_memory(monkeypatch):
    monkeypatch.delenv(devices.SHARE_OF_MEMORY, raising=False)
    for card, cards in (("", ["", "", ""]), ("a1", ["a1", "b2", ""])):
        devices.share_memory(card, cards)
        assert devices.SHARE_OF_MEMORY not in os.environ
    monkeypatch.setenv(devices.SHARE_OF_MEMORY, "")  # so that it is as before when the test has ended
    devices.share_memory("a1", ["a1", "b2", "a1", "a1", ""])
    assert os.environ[devices.SHARE_OF_MEMORY] == "0.2500"


CARD = """
import jax
from jdistgrad.rpc import devices
devices.cuda_uuid = lambda number: f"card{{number}}"
{before}
devices.take_process_device(1)
print(",".join(devices.opened_gpus()), devices.card_to_share())
"""


@pytest.mark.parametrize(
    ("expected", "chosen", "environment"),
    [
        ("5 card0", None, {"CUDA_VISIBLE_DEVICES": "5"}),
        ("4 card1", None, {"CUDA_VISIBLE_DEVICES": "3,4,5"}),
        ("4,5 ", "1,2", {"CUDA_VISIBLE_DEVICES": "3,4,5"}),
        ("5 ", None, {"CUDA_VISIBLE_DEVICES": "5", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
    ],
)
def test_the_card_whose_memory_a_process_would_take(expected, chosen, environment):
    source = CARD.format(before=f'jax.config.update("jax_cuda_visible_devices", "{chosen}")' if chosen else "")
    variables = {**os.environ, "JAX_PLATFORMS": "cuda", **environment}
    done = subprocess.run([sys.executable, "-c", source], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected}\n"


COMPILE = """
import os
{before}
from jdistgrad.rpc import devices
devices.compile_beside_waiting_programs()
print(os.environ.get("XLA_FLAGS", ""))
"""


@pytest.mark.parametrize(
    ("expected", "before", "environment"),
    [
        ("--xla_dump_to= --xla_gpu_autotune_level=0", "", {"XLA_FLAGS": "--xla_dump_to="}),
        ("--xla_gpu_autotune_level=4", "", {"XLA_FLAGS": "--xla_gpu_autotune_level=4"}),
        ("", "import jax; jax.devices()", {"XLA_FLAGS": ""}),
    ],
)
def test_local_workers_compile_while_programs_of_others_wait(expected, before, environment):
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0", **environment}
    source = COMPILE.format(before=before)
    done = subprocess.run([sys.executable, "-c", source], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_workers_that_come_too_late_for_that_are_warned(caplog, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jnp.ones(1)
    devices.compile_beside_waiting_programs()
    assert caplog.text.count("set XLA_FLAGS=--xla_gpu_autotune_level=0 before") == 1
