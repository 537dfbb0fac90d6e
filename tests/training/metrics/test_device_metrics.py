"""Device metrics of all ranks, from an NVML that is not there."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.metrics import device_metrics
from megatron.training.metrics.device_metrics import build_device_metrics
from tests.pool import run_ranks
from tests.training.runs import NEOX, config


class NVMLError(Exception):
    pass


def fake_nvml(broken: bool = False) -> Any:
    """Two GPUs: 40 % and 80 % used, 1 and 3 GiB, 200 and 300 W."""

    def handle(uuid: str) -> int:
        if broken or not uuid.startswith("GPU-"):
            raise NVMLError("Not Found")
        return int(uuid.removeprefix("GPU-"))

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetUtilizationRates=lambda i: SimpleNamespace(gpu=40 * (i + 1)),
        nvmlDeviceGetMemoryInfo=lambda i: SimpleNamespace(used=(2 * i + 1) * 2**30),
        nvmlDeviceGetPowerUsage=lambda i: 200_000 + 100_000 * i,
    )


def build(
    rank: int, world_size: int, setting: Any, broken_rank: int | None
) -> tuple[list[str], dict[str, float] | None]:
    """For the pool: the log lines and the metrics."""
    from megatron.launch import process_info
    from megatron.mpu import init_model_parallel

    sys.modules["pynvml"] = fake_nvml(broken=rank == broken_rank)
    device_metrics.gpu_uuid = lambda device: f"GPU-{rank}"
    args = NeoXArgs.from_dict(config(NEOX, log_device_metrics=setting)).for_world(world_size)
    groups = init_model_parallel(args, process_info(), logging.getLogger("test"))
    lines: list[str] = []
    probe = build_device_metrics(args, groups, SimpleNamespace(info=lines.append))  # type: ignore[arg-type]
    if probe is None:
        return lines, None
    names, values = probe.values()
    return lines, dict(zip(names, values.tolist(), strict=True))


def test_two_ranks() -> None:
    everyone = run_ranks(build, 2, "auto", None)
    assert everyone[0][0] == ["log_device_metrics: auto: on"]
    expected = {
        "device/utilization": (40.0, 60.0, 80.0),
        "device/memory_gib": (1.0, 2.0, 3.0),
        "device/power_watts": (200.0, 250.0, 300.0),
    }
    kinds = ("min", "mean", "max")
    wanted = {f"{name}_{kind}": value for name, row in expected.items() for kind, value in zip(kinds, row, strict=True)}
    assert everyone[0][1] == everyone[1][1] == wanted


def test_auto_is_off_everywhere_when_one_rank_has_none() -> None:
    everyone = run_ranks(build, 2, "auto", 1)
    assert all(metrics is None for _, metrics in everyone)
    assert everyone[0][0] == ["log_device_metrics: auto: off, rank 1: NVML: Not Found"]


@pytest.mark.parametrize("setting", ["auto", True, False])
def test_without_a_gpu(setting: Any) -> None:
    args = NeoXArgs.from_dict(config(NEOX, log_device_metrics=setting))
    lines: list[str] = []
    logger: Any = SimpleNamespace(info=lines.append)
    if setting is True:
        with pytest.raises(ConfigError, match="log_device_metrics: true, but rank 0: there is no NVIDIA GPU"):
            build_device_metrics(args, ParallelGroups.single(), logger)
        return
    assert build_device_metrics(args, ParallelGroups.single(), logger) is None
    assert lines == (["log_device_metrics: auto: off, rank 0: there is no NVIDIA GPU"] if setting == "auto" else [])


def test_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RuntimeError, match=r"pip install 'neox\[nvml\]'"):
        device_metrics.Nvml("GPU-0")


@pytest.mark.gpu
def test_real_gpu() -> None:
    pytest.importorskip("pynvml")
    groups = ParallelGroups.single("cuda:0")
    held = torch.zeros(2**28, device="cuda:0")
    args = NeoXArgs.from_dict(config(NEOX, log_device_metrics=True))
    probe = build_device_metrics(args, groups, logging.getLogger("test"))
    assert probe is not None
    names, values = probe.values()
    metrics = dict(zip(names, values.tolist(), strict=True))
    assert metrics["device/memory_gib_mean"] > held.nbytes / 2**30
    assert 0 <= metrics["device/utilization_max"] <= 100 and metrics["device/power_watts_min"] > 0
