"""Joining the ranks' process group."""

import logging

import pytest
import torch

from megatron.distributed import init_process_group
from megatron.launch import process_info
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
