"""Joining the ranks' process group."""

import logging

import pytest
import torch

from megatron.distributed import init_process_group
from megatron.launch.environment import ProcessInfo, process_info
from megatron.neox_arguments import ConfigError
from tests.model.stages import small
from tests.pool import run_ranks

NCCL = {"distributed_backend": "nccl"}


def backend(rank: int, world_size: int) -> str:
    device = init_process_group(small(**NCCL).for_world(world_size), process_info(), logging.getLogger("tests.quiet"))
    return f"{torch.distributed.get_backend()} {device}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_nccl_without_a_gpu_is_gloo_on_cpus():
    assert run_ranks(backend, 2, init=False) == ["gloo cpu"] * 2


def joined(monkeypatch, driver, visible: str | None) -> list[str]:
    """Lines said by `init_process_group` where NVIDIA's driver lists GPUs that torch does not see."""
    monkeypatch.setattr("megatron.distributed.process_group._GPUS", driver)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    log_lines: list[str] = []
    logger = logging.getLogger("tests.said")
    monkeypatch.setattr(logger, "info", log_lines.append)
    init_process_group(small(**NCCL).for_world(1), process_info(env={}), logger)
    return log_lines


def test_gpus_that_torch_does_not_see_are_no_machine_without_gpus(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="program: distributed_backend: nccl .* torch sees none"):
        joined(monkeypatch, tmp_path, None)
    for driver, visible in ((tmp_path, ""), (tmp_path / "none", None)):
        (line,) = joined(monkeypatch, driver, visible)
        assert line.startswith("distributed_backend: ") and "gloo instead of nccl" in line


@pytest.fixture
def chosen(monkeypatch) -> list[torch.device]:
    """The devices that are set on a machine that has GPUs."""
    devices: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", devices.append)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    return devices


def enter(local_rank: int) -> torch.device:
    place = ProcessInfo(local_rank, 4, local_rank, 4, "localhost", 29500, "slurm")
    return init_process_group(small(**NCCL).for_world(4), place, logging.getLogger("tests.quiet"))


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(4, 3, 3), (1, 3, 0), (1, 0, 0)])
def test_a_task_that_sees_one_gpu_takes_it(monkeypatch, chosen, visible, local_rank, index):
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    assert [enter(local_rank)] == chosen == [torch.device("cuda", index)]


def test_more_ranks_than_gpus_are_refused(monkeypatch, chosen):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="rank 3 .* 3 of 4 .* 2 GPUs"):
        enter(3)
    assert not chosen
