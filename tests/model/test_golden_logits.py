"""GPT-NeoX's own checkpoints give GPT-NeoX's own logits, in any layout."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.checkpointing import load_weights
from megatron.model import build_stage, materialize
from megatron.model.init import stage_parameters
from megatron.mpu import ParallelGroups
from tests.checkpointing.golden import RUNS, checkpoint, golden_args
from tests.model.stages import full_logits, groups_of
from tests.pool import run_ranks

TOLERANCE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}


def golden_logits(run: str, step: int) -> Tensor:
    return torch.from_numpy(np.load(RUNS[run] / f"logits_step{step}.npy"))


@torch.no_grad()
def logits_of(run: str, step: int, groups: ParallelGroups | None = None, **changes: object) -> Tensor:
    """`[batch, seq, vocab]`, whole on every rank."""
    if groups is None:
        changes, groups = {"pipe_parallel_size": 0, "model_parallel_size": 1}, ParallelGroups.single()
    args = golden_args(run, **changes)
    stage = materialize(build_stage(args, groups)).eval()
    params = stage_parameters(stage)
    weights = load_weights(checkpoint(run, step), args, layers=sorted({layer for layer, _, _ in params}),
                           tensor_rank=groups.rank("tensor"), tensor_size=groups.size("tensor"))  # fmt: skip
    for layer, name, param in params:
        param.copy_(weights[layer][name])
    windows = torch.from_numpy(np.load(RUNS[run].parent / "fixed_input_2x65.npy"))
    return full_logits(stage, args, groups, windows[:, :-1])


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("run", RUNS)
def test_one_process(run: str, step: int) -> None:
    expected = golden_logits(run, step)
    assert expected.shape == (2, 64, 384)
    torch.testing.assert_close(logits_of(run, step), expected, **TOLERANCE)
    assert (golden_logits(run, 3 - step) - expected).abs().max() > 0.1, "three steps move them further"


def on_ranks(rank: int, world_size: int, layouts: list[dict[str, object]]) -> list[list[Tensor]]:
    run, layout_logits = "neox_pp2_mp2", []
    for layout in layouts:
        groups = groups_of(golden_args(run, **layout), world_size)
        layout_logits.append([logits_of(run, step, groups, **layout) for step in (0, 3)])
    return layout_logits


@pytest.mark.parametrize("world_size, layouts", [
    (2, [(0, 2, False), (0, 2, True), (2, 1, False)]),
    (4, [(2, 2, False), (2, 2, True), (4, 1, False), (1, 4, False)]),
])  # fmt: skip
def test_any_layout(world_size: int, layouts: list[tuple[int, int, bool]]) -> None:
    keys = [
        {"pipe_parallel_size": pipe, "model_parallel_size": tensor, "sequence_parallel": sequence}
        for pipe, tensor, sequence in layouts
    ]
    for layout_logits in run_ranks(on_ranks, world_size, keys):
        for logits in layout_logits:
            for step, actual in zip((0, 3), logits, strict=True):
                torch.testing.assert_close(actual, golden_logits("neox_pp2_mp2", step), **TOLERANCE)
