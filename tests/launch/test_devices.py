"""How many GPUs a launcher counts; TORCH_CUDA_ARCH_LIST as DeepSpeed reads it."""

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder

from megatron.launch import cuda_driver, devices
from megatron.launch.cuda_driver import is_readable_arch_list, set_arch_list

NUM_TORCH_GPUS = 8  # what torch says when it is asked
NAME = "TORCH_CUDA_ARCH_LIST"


@pytest.mark.parametrize(("build", "driver_gpus", "env", "expected"), [
    ("cuda = '12.8'; hip = None", 2, {}, ["0", "1"]),
    ("cuda = '12.8'; hip = None", 2, {"CUDA_VISIBLE_DEVICES": "GPU-a, 3"}, ["GPU-a", "3"]),
    ("cuda = '12.8'; hip = None", 1, {"CUDA_VISIBLE_DEVICES": "3,9"}, ["3"]),
    ("cuda = '12.8'; hip = None", 0, {"CUDA_VISIBLE_DEVICES": ""}, []),
    ("cuda = '12.8'; hip = None", None, {}, [str(gpu) for gpu in range(NUM_TORCH_GPUS)]),
    ("cuda = None; hip = None", 2, {}, []),
    ("cuda = None; hip = '6.4'", None, {}, [str(gpu) for gpu in range(NUM_TORCH_GPUS)]),
])  # fmt: skip
def test_gpus_are_those_that_torch_would_use(build, driver_gpus, env, expected, monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text(build)
    monkeypatch.setattr(devices, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    monkeypatch.setattr(devices, "device_count", lambda: driver_gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: NUM_TORCH_GPUS)
    assert devices.visible_gpus(env) == expected


def test_the_installed_torch_and_no_driver(monkeypatch):
    monkeypatch.setattr(devices, "device_count", lambda: 3)
    assert len(devices.visible_gpus({})) == (3 if torch.version.cuda else torch.cuda.device_count())

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert cuda_driver.device_count() is None and cuda_driver.capabilities() == []


@pytest.mark.parametrize(("state", "count"), [(0, 3), (100, 0), (803, None), (999, None)])
def test_a_driver_that_does_not_answer_has_not_said_none(state, count, monkeypatch):
    def get_count(pointer):
        pointer._obj.value = 3
        return 0

    fake = SimpleNamespace(cuInit=lambda flags: state, cuDeviceGetCount=get_count)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    assert cuda_driver.device_count() == count


def deepspeed_reads(monkeypatch, value: str) -> str:
    """DeepSpeed's builder reads the variable when it compiles on first use."""
    monkeypatch.setenv(NAME, value)
    builder = FusedAdamBuilder()
    builder.jit_mode = True
    builder.compute_capability_args()
    return os.environ[NAME]


@pytest.mark.parametrize("value", ["9.0a", "10.0a", "8.0;9.0a", "Hopper", "8.0 Hopper"])
def test_what_deepspeed_cannot_read_becomes_that_of_the_device(monkeypatch, value):
    with pytest.raises(ValueError):
        deepspeed_reads(monkeypatch, value)
    env = {NAME: value}
    message = set_arch_list(env, lambda: [(9, 0), (9, 0)])
    assert env == {NAME: "9.0"}
    assert value in message and "by 9.0" in message
    assert deepspeed_reads(monkeypatch, env[NAME]) == "9.0+PTX"


@pytest.mark.parametrize("value", ["9.0", "8.0;9.0", "8.0 9.0+PTX", "8.6;10.0"])
def test_what_it_reads_stays(monkeypatch, value):
    env = {NAME: value}
    assert set_arch_list(env, lambda: [(9, 0)]) is None
    assert env == {NAME: value}
    deepspeed_reads(monkeypatch, value)


def test_other_devices_and_none():
    env = {NAME: "9.0a"}
    set_arch_list(env, lambda: [(10, 0), (8, 0)])
    assert env == {NAME: "8.0;10.0"}
    unset: dict[str, str] = {}
    assert set_arch_list(unset, lambda: [(9, 0)]) is None and unset == {}
    variables = {NAME: "9.0a"}
    assert set_arch_list(variables, lambda: []) is None and variables == {NAME: "9.0a"}
    assert is_readable_arch_list("") and not is_readable_arch_list("9.0,8.0")
