"""The choice of a GPU for each process of a node, before JAX opens any; tested in separate processes, without GPUs."""

import os
import subprocess
import sys

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


@pytest.mark.parametrize(("rank", "expected"), [(0, "0"), (2, "2"), (5, "1")])
def test_each_local_rank_takes_its_gpu(rank, expected):
    """If there are more ranks than GPUs, several ranks share a GPU."""
    assert taken(rank, CUDA_VISIBLE_DEVICES="0,1,2,3") == [expected, "None"]


def test_a_single_gpu_is_everybodys():
    assert taken(3, CUDA_VISIBLE_DEVICES="0") == ["all", "None"]


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
