"""`deepy.py doctor` and what it is made of, on a machine with GPUs."""

import json

import pytest
import torch

from megatron.launch.cuda_driver import capabilities, device_count
from megatron.launch.devices import visible_gpus
from megatron.launch.doctor import main
from megatron.launch.doctor.devices import read_gpus

pytestmark = pytest.mark.gpu


def test_the_driver_says_what_torch_says():
    assert device_count() == torch.cuda.device_count()
    assert capabilities() == [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def test_every_gpu_is_asked_and_computes(capsys):
    gpus = read_gpus(visible_gpus({}))
    assert [gpu.problem for gpu in gpus] == [""] * torch.cuda.device_count()
    assert all(0 < gpu.free <= gpu.total for gpu in gpus)
    main(["--json"], lambda args: None)
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["driver"]["state"] == checks["ability"]["state"] == "ok"
    assert "bf16 yes" in checks["ability"]["found"] and "torch's own" in checks["nccl"]["found"]
