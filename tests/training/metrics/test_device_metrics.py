"""Device metrics of all ranks, from an NVML that is not there."""

import logging
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.launch import process_info
from megatron.mpu import ParallelGroups, init_model_parallel
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

    return SimpleNamespace(NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=handle,
                           nvmlDeviceGetUtilizationRates=lambda i: SimpleNamespace(gpu=40 * (i + 1)),
                           nvmlDeviceGetMemoryInfo=lambda i: SimpleNamespace(used=(2 * i + 1) * 2**30),
                           nvmlDeviceGetPowerUsage=lambda i: 200_000 + 100_000 * i)  # fmt: skip


def build(rank: int, world_size: int, broken_ranks: list[int | None]) -> list[tuple[list[str], Any]]:
    """For the pool: the log lines and the metrics, where NVML of this rank is broken."""
    device_metrics.gpu_uuid = lambda device: f"GPU-{rank}"
    args = NeoXArgs.from_dict(config(NEOX, log_device_metrics="auto")).for_world(world_size)
    groups, outcomes = init_model_parallel(args, process_info(), logging.getLogger("test")), []
    for broken in broken_ranks:
        sys.modules["pynvml"] = fake_nvml(broken=rank == broken)
        lines: list[str] = []
        probe = build_device_metrics(args, groups, SimpleNamespace(info=lines.append))  # type: ignore[arg-type]
        names, values = probe.values() if probe is not None else ([], torch.empty(0))
        outcomes.append((lines, dict(zip(names, values.tolist(), strict=True))))
    return outcomes


def test_two_ranks() -> None:
    (both_work, one_has_none), other_rank = run_ranks(build, 2, [None, 1])
    expected = {"utilization": (40.0, 60.0, 80.0), "memory_gib": (1.0, 2.0, 3.0), "power_watts": (200.0, 250.0, 300.0)}
    kinds = ("min", "mean", "max")
    expected_metrics = {
        f"device/{name}_{kind}": row[i] for name, row in expected.items() for i, kind in enumerate(kinds)
    }
    assert both_work[1] == other_rank[0][1] == expected_metrics and both_work[0] == ["log_device_metrics: auto: on"]
    assert one_has_none[1] == other_rank[1][1] == {}, "auto is off everywhere"
    [line] = one_has_none[0]
    assert re.search("log_device_metrics.* off.* rank 1.*NVML: Not Found", line)


@pytest.mark.parametrize("setting", ["auto", True, False])
def test_without_a_gpu(setting: Any) -> None:
    args, lines = NeoXArgs.from_dict(config(NEOX, log_device_metrics=setting)), list[str]()
    logger: Any = SimpleNamespace(info=lines.append)
    if setting is True:
        with pytest.raises(ConfigError, match="log_device_metrics: true.* rank 0.* no NVIDIA GPU"):
            build_device_metrics(args, ParallelGroups.single(), logger)
        return
    assert build_device_metrics(args, ParallelGroups.single(), logger) is None
    assert len(lines) == (setting == "auto") and all("off" in line and "no NVIDIA GPU" in line for line in lines)


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
