"""The anatomy of a step's time: a trace of an H200 by kind, overlapping work, mistakes in a CPU step."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.step_profile import Profile, profiled
from benchmarks.step_work import (
    ATTENTION,
    COPIES,
    HEAD,
    IDLE,
    NORM,
    OPTIMIZER,
    POINTWISE,
    PRODUCTS,
    Model,
    Operation,
    Piece,
    Rates,
    WorkRow,
    shares,
    totals_by_kind,
    work_rows,
)

# A step of the 1.4B shape, as `train_throughput.py --shape 1.4B --compile --only native` has it.
H200_STEP = Path(__file__).parent / "data" / "h200-1.4b-step.json.gz"
LAYERS, HIDDEN, VOCABULARY, TOKENS, SEQ = 24, 2048, 50304, 16384, 2048
MODEL = Model(1_414_000_000, VOCABULARY, LAYERS * TOKENS * (SEQ + 1) / 2 * 4 * HIDDEN * 3.5)
RATES = Rates(800e12, 4.2e12)


@pytest.fixture(scope="module")
def h200() -> tuple[list[dict[str, Any]], list[WorkRow]]:
    events = json.loads(gzip.decompress(H200_STEP.read_bytes()))["traceEvents"]
    kernels = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    window = min(e["ts"] for e in kernels) * 1e-6, max(e["ts"] + e["dur"] for e in kernels) * 1e-6
    return kernels, work_rows(events, window, 1, MODEL, RATES)


def test_kinds_of_a_gpus_step_add_up(h200: tuple[list[dict[str, Any]], list[WorkRow]]) -> None:
    kernels, rows = h200
    span = max(e["ts"] + e["dur"] for e in kernels) - min(e["ts"] for e in kernels)
    assert sum(row.seconds for row in rows) == pytest.approx(span * 1e-6, rel=1e-6)
    idle = sum(row.seconds for row in rows if row.kind == IDLE)
    assert span * 1e-6 - idle == pytest.approx(sum(e["dur"] for e in kernels) * 1e-6, rel=1e-6)
    assert sum(row.seconds for row in totals_by_kind(rows)) == pytest.approx(span * 1e-6, rel=1e-6)


def test_products_of_a_gpus_step_are_the_models(h200: tuple[list[dict[str, Any]], list[WorkRow]]) -> None:
    """Six times the tokens times the weights of the linears; the head's three by themselves."""
    flops = {row.kind: row.flops for row in totals_by_kind(h200[1])}
    assert flops[PRODUCTS] == 6 * TOKENS * LAYERS * 12 * HIDDEN**2
    assert flops[HEAD] == 6 * TOKENS * HIDDEN * VOCABULARY
    assert flops[ATTENTION] == pytest.approx(MODEL.attention_flops)


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("nvjet_sm90_tst_128x256", PRODUCTS), ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", ATTENTION),
        ("triton_poi_fused_gelu_view", POINTWISE), ("FusedOptimizerTensorListMetadata", OPTIMIZER),
        ("LpNormFunctor", NORM), ("direct_copy_kernel_cuda", COPIES), ("triton_red_fused__to_copy_amax", HEAD),
    ],
)  # fmt: skip
def test_a_kernel_is_of_one_kind(h200: tuple[list[dict[str, Any]], list[WorkRow]], kernel: str, kind: str) -> None:
    """Kernels of this name take no more time than their kind has."""
    kernel_seconds = sum(e["dur"] for e in h200[0] if kernel in e["name"]) * 1e-6
    assert 0 < kernel_seconds <= sum(row.seconds for row in h200[1] if row.kind == kind) * (1 + 1e-9)


def test_floors_are_below_the_times(h200: tuple[list[dict[str, Any]], list[WorkRow]]) -> None:
    """To what reads alone may reach beyond the rate of copies."""
    rows = [row for row in h200[1] if row.floor is not None and row.seconds > 1e-3]
    assert len(rows) > 20 and all(row.floor < 1.05 * row.seconds for row in rows if row.floor)


def test_an_instant_is_shared_out() -> None:
    operation = Operation("aten::mm")
    pieces = [Piece(operation, "", begin, end) for begin, end in ((1.0, 4.0), (2.0, 3.0), (6.0, 12.0))]
    seconds, idle = shares(pieces, 0.0, 10.0)
    assert (seconds, idle) == (pytest.approx([2.5, 0.5, 4.0]), pytest.approx(3.0))


# -- mistakes in a step of a CPU -----------------------------------------------------------------------------

Change = Callable[[nn.Sequential, torch.optim.Optimizer], None]
SMALL = Model(parameters=50_000, vocabulary=777, attention_flops=1.0)


def step_of(change: Change | None = None) -> Profile:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 777))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    update, inputs = optimizer.step, torch.randn(128, 64)
    if change is not None:
        change(model, optimizer)

    def step() -> None:
        model(inputs).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    assert update is not None
    return profiled(step, torch.device("cpu"), steps=2)


def calls(profile: Profile) -> dict[tuple[str, str], float]:
    rows = work_rows(profile.events, profile.window, profile.steps, SMALL, RATES)
    assert profile.steps * sum(row.seconds for row in rows) == pytest.approx(profile.window[1] - profile.window[0])
    return {(row.kind, row.name): row.calls for row in rows}


def norm_three_times(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    norm = model[1]
    model[1] = nn.Sequential(norm, norm, norm)


def update_twice(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    original_step = optimizer.step

    def step_twice() -> None:
        original_step()
        original_step()

    optimizer.step = step_twice  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(
    "change, row, times",
    [(norm_three_times, (POINTWISE, "native_layer_norm"), 3), (update_twice, (OPTIMIZER, "_fused_adamw_"), 2)],
)
def test_a_mistake_shows_in_its_row(change: Change, row: tuple[str, str], times: int) -> None:
    right, wrong = calls(step_of()), calls(step_of(change))
    assert wrong[row] == times * right[row] > 0
    changed_rows = {key for key in right if right[key] != wrong.get(key)}
    related = {key for key in changed_rows if key[0] == row[0] or key[0] == COPIES}
    assert changed_rows == related, "other kinds have as much work as before"
