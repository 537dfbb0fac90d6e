"""`async_tensor_parallel` is refused, or `auto` says why not, where its parts are missing."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.model import Stage, build_stage
from megatron.mpu import Linear, ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.async_tensor_parallel import use_async_tensor_parallel
from tests.model.stages import small

GPU = torch.device("cuda", 0)
SPLIT = {"model_parallel_size": 2, "sequence_parallel": True}
NOT_SPLIT = "needs sequence_parallel: true and model_parallel_size above 1, or nothing is gathered and scattered"
FAR = r"needs GPUs that read each other's memory \(NVLink\), cuda:0 does not reach cuda:1"


def stage_and_groups(values: dict[str, Any], device: torch.device) -> tuple[Stage, NeoXArgs, ParallelGroups]:
    """A stage as of one rank, and groups that say to be two tensor ranks on this device."""
    args, groups = small(**values), ParallelGroups.single()
    stage = build_stage(small(), groups)
    if args.tp > 1:
        handles = MappingProxyType({**groups.handles, "tensor": mock.Mock()})
        groups = replace(groups, handles=handles, sizes=MappingProxyType({**groups.sizes, "tensor": 2}), world_size=2)
    return stage, args, replace(groups, device=device)


@pytest.mark.parametrize(
    ("values", "device", "gpus", "missing"),
    [
        ({}, GPU, {}, NOT_SPLIT),
        ({"model_parallel_size": 2}, GPU, {}, NOT_SPLIT),
        (SPLIT, torch.device("cpu"), {}, "needs GPUs, this runs on cpu"),
        (SPLIT, GPU, {"capability": (7, 5)}, "needs compute capability 8.0, T4 has 7.5"),
        (SPLIT, GPU, {"ranks": 1}, "needs the 2 tensor ranks on one machine, which has 1 ranks"),
        (SPLIT, GPU, {"reach": False}, FAR),
        (SPLIT, GPU, {}, None),
        (SPLIT, GPU, {"visible": 1, "reach": False}, None),
    ],
)  # fmt: skip
def test_choice(
    values: dict[str, Any],
    device: torch.device,
    gpus: dict[str, Any],
    missing: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpus.get("capability", (9, 0)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus.get("visible", 2))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: gpus.get("reach", True))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(gpus.get("ranks", 2)))
    for asked in (False, True, "auto"):
        said: list[str] = []
        stage, args, groups = stage_and_groups({**values, "async_tensor_parallel": asked}, device)
        if asked is True and missing is not None:
            with pytest.raises(ConfigError, match=f"async_tensor_parallel: true {missing}; write auto or false"):
                use_async_tensor_parallel(stage, args, groups, said.append)
            continue
        use_async_tensor_parallel(stage, args, groups, said.append)
        chosen = {module.async_tensor_parallel for module in stage.modules() if isinstance(module, Linear)}
        assert chosen == {bool(asked) and missing is None}
        assert len(said) == (asked == "auto")
        assert all(f"auto chose {str(missing is None).lower()}: " in line for line in said)
