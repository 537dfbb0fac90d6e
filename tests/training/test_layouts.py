"""Every parallel layout trains like one process: losses, gradient norms and final weights.

Pipelines run on DeepSpeed, the other layouts on the native engine and on DeepSpeed.
"""

from typing import Any

import pytest

from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, NEOX, RPE, SGD, Curve, config, curves, furthest, whole

TP2, PP2, SP = {"model_parallel_size": 2}, {"pipe_parallel_size": 2}, {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, TP2),
    "tp2+sp": (2, TP2 | SP),
    "pp2": (2, PP2),
    "tp2 x pp2": (4, TP2 | PP2),
    "tp2 x pp2 +sp": (4, TP2 | PP2 | SP),
    "dp2 x tp2": (4, TP2),
    "dp2 x pp2": (4, PP2),
    "pp4": (4, {"pipe_parallel_size": 4}),
    "dp2 zero1": (2, {"zero_optimization": {"stage": 1}}),
    "dp2 zero2": (2, {"zero_optimization": {"stage": 2}}),
    "dp2 zero3": (2, {"zero_optimization": {"stage": 3}}),
    "dp4": (4, {}),
    "dp4 zero1": (4, {"zero_optimization": {"stage": 1}}),
    "dp4 zero2": (4, {"zero_optimization": {"stage": 2}}),
    "dp4 zero3": (4, {"zero_optimization": {"stage": 3}}),
    "dp2 x tp2 zero1": (4, TP2 | {"zero_optimization": {"stage": 1}}),
    "dp2 x tp2 zero2": (4, TP2 | {"zero_optimization": {"stage": 2}}),
    "dp2 x tp2 +sp zero3": (4, TP2 | SP | {"zero_optimization": {"stage": 3}}),
}
ENGINES = {name: ("deepspeed",) if "pp" in name else ("native", "deepspeed") for name in LAYOUTS}
LAYOUTS["dp4 zero3 by twos"] = (4, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})
ENGINES["dp4 zero3 by twos"] = ("native",)
IN_TABLE = [f"{name}, native" for name in ("dp4", "dp4 zero1", "dp4 zero2", "dp2 x tp2 zero2")]
"""Those that the table of `make test-all` has alone."""
ROWS = [row for name in LAYOUTS for engine in ENGINES[name] if (row := f"{name}, {engine}") not in IN_TABLE]
MORE_ROWS = [
    "tp2+sp, native", "tp2+sp, deepspeed", "tp2 x pp2, deepspeed", "dp2 x tp2 zero1, native",
    "dp2 x tp2 zero2, deepspeed", "dp2 x tp2 +sp zero3, native", "dp2 x tp2 +sp zero3, deepspeed",
    "dp4 zero1, deepspeed", "dp4 zero3, native", "dp4 zero3 by twos, native", "dp2, native", "pp4, deepspeed",
    "dp2 x tp2, native", "dp2 zero1, deepspeed", "dp2 x pp2, deepspeed", "dp2 zero2, native",
]  # fmt: skip
SOAK_ROWS = [
    *(f"{name}, deepspeed" for name in ("dp2", "tp2", "dp2 x tp2", "dp2 zero2", "dp2 x tp2 zero1", "dp4 zero3")),
    *("dp4, deepspeed", "dp4 zero2, deepspeed"),
]
MODELS, OPTIMIZERS = {"neox": NEOX, "llama": LLAMA, "rpe": RPE}, {"sgd": SGD, "adamw": ADAMW}
STEPS = 10
# Micro-batch size, model, optimizer, tied. Every layout meets every size and model, both optimizers, tied and
# untied; `make test-all` adds other cells in some layouts, `make test-all` runs all 36 in every layout.
CELLS = [(1, "neox", "sgd", False), (4, "llama", "adamw", False), (2, "rpe", "adamw", True)]
MORE_CELLS = [
    (1, "llama", "adamw", True),
    (2, "neox", "adamw", True),
    (2, "llama", "sgd", False),
    (4, "neox", "sgd", True),
]


def cell_config(model: str, optimizer: str, tied: bool, micro_batch: int, layout: dict[str, Any]) -> dict[str, Any]:
    """One cell of the table as a configuration."""
    return config(
        MODELS[model], OPTIMIZERS[optimizer], layout,
        no_weight_tying=not tied, train_micro_batch_size_per_gpu=micro_batch,
    )  # fmt: skip


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str, bool], Curve]:
    """One process, one micro-batch of 8."""
    keys = sorted({cell[1:] for cell in CELLS + MORE_CELLS})
    configs = [cell_config(*key, 8, {}) for key in keys]
    parts = run_ranks(curves, 1, configs, STEPS, timeout=120)[0]
    curves_by_cell = {key: whole([part], values) for key, part, values in zip(keys, parts, configs, strict=True)}
    for (_, optimizer, _), curve in curves_by_cell.items():
        assert optimizer == "sgd" or min(curve.norms) > ADAMW["gradient_clipping"], "the clip must bite"
        assert curve.losses[-1] < curve.losses[0] - 0.05, "the model must learn, or equality says little"
    return curves_by_cell


@pytest.mark.parametrize("row", with_more(ROWS, *MORE_ROWS, product=SOAK_ROWS))
def test_layout_equals_one_process(
    row: str, references: dict[tuple[str, str, bool], Curve], capsys: pytest.CaptureFixture[str]
) -> None:
    check_cells(row, CELLS, references, capsys)


IN_OTHER_CELLS = ("tp2, native", "pp2, deepspeed", "dp2 zero3, native")


@pytest.mark.more
@pytest.mark.parametrize("row", IN_OTHER_CELLS)
def test_layout_equals_one_process_in_other_cells(
    row: str, references: dict[tuple[str, str, bool], Curve], capsys: pytest.CaptureFixture[str]
) -> None:
    check_cells(row, MORE_CELLS, references, capsys)


def check_cells(
    row: str,
    cells: list[tuple[int, str, str, bool]],
    references: dict[tuple[str, str, bool], Curve],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Losses, norms and weights of a layout's cells are those of one process."""
    name, engine = row.rsplit(", ", 1)
    ranks, layout = LAYOUTS[name]
    most = 2 if name.startswith("dp4") else 4  # of a step's 8 samples
    configs = [
        cell_config(model, opt, tied, min(micro, most), {**layout, "engine": engine})
        for micro, model, opt, tied in cells
    ]
    everyone = run_ranks(curves, ranks, configs, STEPS, timeout=240)
    worst = (0.0, 0.0, 0.0)
    for i, (_, *key) in enumerate(cells):
        differences = furthest(whole([parts[i] for parts in everyone], configs[i]), references[tuple(key)])
        worst = tuple(map(max, worst, differences))  # type: ignore[assignment]
    with capsys.disabled():
        print(f"\n  {row:32s} loss {worst[0]:.1e}  gradient norm {worst[1]:.1e}  weights {worst[2]:.1e}", end=" ")
    assert worst[0] <= 1e-5, "losses"
    assert worst[1] <= 1e-5, "gradient norms"
    assert worst[2] <= 1e-4, "final weights"
