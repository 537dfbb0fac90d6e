"""Joining the ranks' process group."""

import logging

import pytest
import torch

from megatron.distributed import init_process_group
from megatron.launch import process_info
from megatron.launch.environment import ProcessInfo
from megatron.neox_arguments import ConfigError
from tests.model.stages import small
from tests.pool import run_ranks

NCCL = {"distributed_backend": "nccl"}


def backend(rank: int, world_size: int) -> str:
    device = init_process_group(small(**NCCL).for_world(world_size), process_info(), logging.getLogger("tests.quiet"))
    return f"{torch.distributed.get_backend()} {device}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("ranks", [1, 2])
def test_nccl_without_a_gpu_is_gloo_on_cpus(ranks):
    assert run_ranks(backend, ranks, init=False) == ["gloo cpu"] * ranks


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
    with pytest.raises(ConfigError, match="program: distributed_backend: nccl, but torch sees none of this machine's"):
        joined(monkeypatch, tmp_path, None)
    for driver, visible in ((tmp_path, ""), (tmp_path / "none", None)):
        (line,) = joined(monkeypatch, driver, visible)
        assert line.startswith("distributed_backend: nccl is gloo here")


def place(local_rank: int, ranks_here: int) -> ProcessInfo:
    return ProcessInfo(local_rank, ranks_here, local_rank, ranks_here, "localhost", 29500, "slurm")


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(4, 3, 3), (1, 3, 0), (1, 0, 0)])
def test_a_task_that_sees_one_gpu_takes_it(monkeypatch, visible, local_rank, index):
    chosen: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    logger = logging.getLogger("tests.quiet")
    device = init_process_group(small(**NCCL).for_world(4), place(local_rank, 4), logger)
    assert [device] == chosen == [torch.device("cuda", index)]


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="rank 3 is number 3 of 4 on its machine and sees 2; start 2 ranks there"):
        init_process_group(small(**NCCL).for_world(4), place(3, 4), logging.getLogger("tests.quiet"))
