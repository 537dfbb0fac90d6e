"""Norms of single parameters are those of the whole parameter, the same in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.native.in_turn import TIMEOUT, to_their_ends
from tests.training.runs import ADAMW, LAYOUTS, NEOX, OFFLOADED, begin, cells, config
from tests.training.test_host_sync import steps

KEYS = ("log_param_norm", "log_grad_norm", "log_grad_pct_zeros", "log_optimizer_states")
LOGGED = {**dict.fromkeys((*KEYS, "log_gradient_noise_scale"), True), "gradient_noise_scale_n_batches": 2}
PREFIXES = ("parameter_norms/", "gradient_norms/", "pct_grad_zeros/", "optimizer_state_norms/")
TP2, PP2, TIED, BF16 = LAYOUTS["tp2"][1], LAYOUTS["pp2"][1], {"no_weight_tying": False}, {"precision": "bfloat16"}
ZERO1, ZERO2, ZERO3 = ({"zero_optimization": {"stage": stage}} for stage in (1, 2, 3))
CELLS: dict[int, list[dict[str, Any]]] = {
    2: [TP2, PP2 | TIED, OFFLOADED, ZERO1 | BF16, ZERO3],
    4: [TP2 | PP2 | TIED, PP2],
    -2: [{}, ZERO1, ZERO2, TP2 | BF16, ZERO3 | BF16, PP2],
}
"""By number of ranks; those of -2 are the rest of the product, of two."""


def rows_of(folder: Path, layouts: list[dict[str, Any]], ranks: int) -> list[dict[str, float]]:
    """The only row of metrics.jsonl of each run of two steps, the second of which is logged."""
    common = {"no_weight_tying": True, "train_iters": 2, "num_layers": 2, "log_interval": 2}
    runs = [
        config(NEOX, ADAMW, LOGGED, common, layout, train_micro_batch_size_per_gpu=2, log_dir=f"{folder}/{i}")
        for i, layout in enumerate(layouts)
    ]
    run_ranks(to_their_ends, ranks, runs, timeout=TIMEOUT)
    return [json.loads((Path(run["log_dir"]) / "metrics.jsonl").read_text()) for run in runs]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Untied, tied, untied in bf16."""
    return rows_of(tmp_path_factory.mktemp("one"), [{}, TIED, BF16], 1)


@pytest.mark.parametrize("ranks", cells([2], [4], [-2]))
def test_same_in_every_layout(ranks: int, one_process: list[dict[str, float]], tmp_path: Path) -> None:
    for layout, row in zip(CELLS[ranks], rows_of(tmp_path, CELLS[ranks], abs(ranks)), strict=True):
        expected_row = one_process[1 if TIED.items() <= layout.items() else 2 if BF16.items() <= layout.items() else 0]
        assert row["iteration"] == 2
        exact = "precision" not in layout
        if exact:
            assert row["train/noise_scale"] == pytest.approx(expected_row["train/noise_scale"], rel=1e-3), layout
        actual, expected = (
            {name: metrics[name] for name in metrics if name.startswith(PREFIXES)} for metrics in (row, expected_row)
        )
        assert actual.keys() == expected.keys()
        tolerance = 1e-4 if exact else 2e-2
        for metric, value in actual.items():
            # A gradient that is rounding (of a key's bias) is noise; bf16 rounds one in 32 to 0 or not.
            noise_floor = 1e-3 * tolerance + 1e-7
            if metric.startswith("pct"):
                noise_floor = 7.0 if not exact else 1.5 if "query_key_value.bias" in metric else 0.0
            assert value == pytest.approx(expected[metric], rel=tolerance, abs=noise_floor), (layout, metric)
        total_norm = sum(value**2 for metric, value in actual.items() if metric.startswith("gradient_norms/")) ** 0.5
        assert total_norm == pytest.approx(row["train/grad_norm"], rel=1e-4 if exact else 1e-2), layout


@pytest.mark.parametrize("name", cells(["pp2", "zero3"], product=["plain", "zero2"]))
def test_measuring_does_not_wait(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    (reads, names), *other_ranks = run_ranks(
        steps, ranks, config(NEOX, layout, LOGGED, train_micro_batch_size_per_gpu=4)
    )
    assert reads == 8 and "train/noise_scale" in names and other_ranks == [(reads, names)] * (ranks - 1)


def directly(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, float]:
    """For the pool: after a run what torch says of the same model's first step, without the engine's help."""
    to_their_ends(rank, world_size, [values])
    training = begin(values)
    stage, batches, loss = training.engine.stage, next(batches_of(training)), torch.zeros(())
    weight = sum(float(batch.loss_weights.sum()) for batch in batches)
    for batch in batches:
        logits: Any = stage(None, batch)
        losses = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.t().flatten(), reduction="none")
        loss = loss + (losses * batch.loss_weights.t().flatten()).sum() / weight
    loss.backward()
    norms = {}
    params: Any = stage.named_parameters()
    for full_name, param in params:
        name = full_name.removeprefix("layers.")
        norms[f"gradient_norms/{name}"] = float(param.grad.norm())
        norms[f"pct_grad_zeros/{name}"] = 100.0 * float((param.grad == 0).double().mean())
        # AdamW's first step from nothing: exp_avg is (1 - beta1) of the clipped gradient.
        norms[f"optimizer_state_norms/{name}_exp_avg"] = 0.1 * float(param.grad.norm())
    return norms


def test_against_torch(tmp_path: Path) -> None:
    values = config(NEOX, dict.fromkeys(KEYS, True), train_iters=1, num_layers=2, train_micro_batch_size_per_gpu=4)
    values |= {"gradient_clipping": 0.0, "log_dir": str(tmp_path)}
    [expected] = run_ranks(directly, 1, values)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    for metric, value in expected.items():
        assert row[metric] == pytest.approx(value, rel=1e-4, abs=1e-7), metric
    assert "parameter_norms/2.attention.query_key_value.weight" in row
    assert any(name.endswith(".norm.weight_exp_avg_sq") for name in row)
