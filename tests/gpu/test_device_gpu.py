"""A machine with GPUs describes itself, and the collectives of training run on one rank."""

import json
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.launch.cuda_driver import capabilities, device_count
from megatron.launch.devices import visible_gpus
from megatron.launch.doctor import main
from megatron.launch.doctor.devices import read_gpus
from megatron.mpu.torch_versions import all_gather_single, reduce_scatter_single
from megatron.planning.calibrate import measured

pytestmark = pytest.mark.gpu


@pytest.mark.only_gpu("it asks the driver")
def test_the_driver_says_what_torch_says() -> None:
    assert device_count() == torch.cuda.device_count()
    assert capabilities() == [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


@pytest.mark.only_gpu("it asks every GPU")
def test_every_gpu_is_asked_and_computes(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = read_gpus(visible_gpus({}))
    assert [gpu.problem for gpu in gpus] == [""] * torch.cuda.device_count()
    assert all(0 < gpu.free <= gpu.total for gpu in gpus)
    main(["--json"], lambda args: None)
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["driver"]["state"] == checks["ability"]["state"] == "ok"
    assert "bf16 yes" in checks["ability"]["found"] and "torch's own" in checks["nccl"]["found"]


@pytest.mark.only_gpu("it measures a GPU")
def test_a_gpu_is_measured_for_plans() -> None:
    gpu, reached = measured("cuda")
    assert 0.3 < reached.product < 1 and 0.3 < reached.copy < 1 and 0.2 < reached.attention < 1
    assert 1e-7 < reached.launch < reached.host < 1e-3 and gpu.multiprocessors > 50


COLLECTIVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_reduce": lambda out, source: dist.all_reduce(out),
    "broadcast": lambda out, source: dist.broadcast(out, 0),
    "all_gather": lambda out, source: all_gather_single(out.zero_(), source),
    "reduce_scatter": lambda out, source: reduce_scatter_single(out.zero_(), source),
    "all_to_all": lambda out, source: dist.all_to_all_single(out.zero_(), source),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_with_one_rank(name: str, dtype: torch.dtype, device: torch.device) -> None:
    source = torch.arange(1024, device=device).to(dtype)
    out = source.clone()
    COLLECTIVES[name](out, source)
    assert torch.equal(out, source)


def test_the_group_is_the_devices_and_objects_are_gathered(device: torch.device) -> None:
    assert dist.get_backend() == {"cuda": "nccl", "cpu": "gloo"}[device.type]
    objects: list[object] = [None]
    dist.all_gather_object(objects, {"rank": 0})
    dist.barrier()
    assert objects == [{"rank": 0}]
