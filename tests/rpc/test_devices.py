"""The choice of a GPU for each process of a node, before JAX opens any; tested without GPUs."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jdistgrad.rpc import devices

TAKE = """
import jax
from jdistgrad.rpc import devices
devices.take_process_device(5)
print(jax.config.values["jax_cuda_visible_devices"], jax.config.values["jax_default_device"])
"""


def test_each_local_rank_takes_its_gpu():
    """If there are more ranks than GPUs, several ranks share a GPU."""
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    done = subprocess.run([sys.executable, "-c", TAKE], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "None"]


@pytest.fixture
def process(monkeypatch):
    """Return a function that says how a process is before ``init``, and returns what is told to JAX then."""

    def be(*, opened=(), platforms="cuda", chosen="all", **environment):
        told = []
        config = {"jax_platforms": platforms, "jax_cuda_visible_devices": chosen, "jax_default_device": None}
        monkeypatch.setattr(devices, "configured", config.get)
        monkeypatch.setattr(devices, "backends_are_initialized", lambda: bool(opened))
        monkeypatch.setattr(jax, "local_devices", lambda: list(opened))
        monkeypatch.setattr(jax.config, "update", lambda *setting: told.append(setting))
        monkeypatch.setattr(devices, "cuda_uuid", lambda number: f"card{number}")
        for name in devices.CHOICES_OF_MEMORY:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return told

    return be


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "chosen": "3"}, []),
        ({"opened": "abcd"}, [("jax_default_device", "c")]),
    ],
    ids=["there is one GPU", "the user has chosen", "JAX runs already"],
)
def test_no_gpu_is_taken_where(process, before, told):
    found = process(**before)
    devices.take_process_device(6)
    assert found == told


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


@pytest.mark.parametrize(
    ("gpus", "card", "before"),
    [
        (["5"], "card0", {"CUDA_VISIBLE_DEVICES": "5"}),
        (["4"], "card1", {"CUDA_VISIBLE_DEVICES": "3,4,5", "chosen": "1"}),
        (["4", "5"], "", {"CUDA_VISIBLE_DEVICES": "3,4,5", "chosen": "1,2"}),
        (["5"], "", {"CUDA_VISIBLE_DEVICES": "5", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        (["5"], "", {"CUDA_VISIBLE_DEVICES": "5", "platforms": "cpu"}),
    ],
)
def test_the_card_whose_memory_a_process_would_take(process, gpus, card, before):
    process(**before)
    assert (devices.opened_gpus(), devices.card_to_share()) == (gpus, card)


@pytest.mark.parametrize(
    ("expected", "opened", "flags"),
    [
        ("--xla_dump_to= --xla_gpu_autotune_level=0", "", "--xla_dump_to="),
        ("--xla_gpu_autotune_level=4", "", "--xla_gpu_autotune_level=4"),
        ("", "a", ""),
    ],
)
def test_local_workers_compile_while_programs_of_others_wait(process, expected, opened, flags):
    process(opened=opened, CUDA_VISIBLE_DEVICES="0", XLA_FLAGS=flags)
    devices.compile_beside_waiting_programs()
    assert os.environ["XLA_FLAGS"] == expected


def test_workers_that_come_too_late_for_that_are_warned(caplog, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jnp.ones(1)
    devices.compile_beside_waiting_programs()
    assert caplog.text.count("set XLA_FLAGS=--xla_gpu_autotune_level=0 before") == 1
