"""How many GPUs a launcher counts, from torch's build and the driver; torch itself where they do not say."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from megatron.launch import cuda_driver, devices

ASKED = 8  # what torch says when it is asked


@pytest.mark.parametrize(
    ("build", "by_driver", "env", "expected"),
    [
        ("cuda = '12.8'; hip = None", 2, {}, ["0", "1"]),
        ("cuda = '12.8'; hip = None", 2, {"CUDA_VISIBLE_DEVICES": "GPU-a, 3"}, ["GPU-a", "3"]),
        ("cuda = '12.8'; hip = None", 1, {"CUDA_VISIBLE_DEVICES": "3,9"}, ["3"]),
        ("cuda = '12.8'; hip = None", 0, {"CUDA_VISIBLE_DEVICES": ""}, []),
        ("cuda = '12.8'; hip = None", None, {}, [str(gpu) for gpu in range(ASKED)]),
        ("cuda = None; hip = None", 2, {}, []),
        ("cuda = None; hip = '6.4'", None, {}, [str(gpu) for gpu in range(ASKED)]),
    ],
)
def test_gpus_are_those_that_torch_would_use(build, by_driver, env, expected, monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text(build)
    monkeypatch.setattr(devices, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    monkeypatch.setattr(devices, "device_count", lambda: by_driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: ASKED)
    assert devices.visible_gpus(env) == expected


def test_the_installed_torch_says_for_what_it_is_built(monkeypatch):
    monkeypatch.setattr(devices, "device_count", lambda: 3)
    assert len(devices.visible_gpus({})) == (3 if torch.version.cuda else torch.cuda.device_count())


@pytest.mark.parametrize(("state", "count"), [(0, 3), (100, 0), (803, None), (999, None)])
def test_a_driver_that_does_not_answer_has_not_said_none(state, count, monkeypatch):
    def get_count(pointer):
        pointer._obj.value = 3
        return 0

    fake = SimpleNamespace(cuInit=lambda flags: state, cuDeviceGetCount=get_count)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    assert cuda_driver.device_count() == count


def test_without_a_driver(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert cuda_driver.device_count() is None and cuda_driver.capabilities() == []
