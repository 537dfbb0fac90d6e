"""Distillation in every layout beside one process, and going on from a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import assert_goes_on
from tests.training.distillation.runs import LABELLED, student
from tests.training.runs import ADAMW, Curve, curves, furthest, run_to_end, whole

# fmt: off
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2, sp": (2, {"model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipe_parallel_size": 2}),
    "dp2": (2, {}),
    "zero1": (2, {"zero_optimization": {"stage": 1}}),
    "zero3": (2, {"zero_optimization": {"stage": 3}}),
    "zero1, deepspeed": (2, {"zero_optimization": {"stage": 1}, "engine": "deepspeed"}),
    "zero3, deepspeed": (2, {"zero_optimization": {"stage": 3}, "engine": "deepspeed"}),
    "zero2, offloaded": (2, {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "engine": "deepspeed",
        "optimizer": {**ADAMW["optimizer"], "type": "CPU_Torch_Adam"},
    }),
    "tp2, pp2": (4, {"model_parallel_size": 2, "pipe_parallel_size": 2}),
}
# fmt: on
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "forward": (DOCUMENTS, {"weight": 0.7}),
    "jsd": (LABELLED, {"beta": 0.3, "temperature": 2.0}),
    "top": ({}, {"beta": 1.0, "top_k": 8}),
}
STEPS = 5


def runs(teacher: str, **layout: Any) -> list[dict[str, Any]]:
    return [student(teacher, parts, layout, **keys) for parts, keys in KINDS.values()]


@pytest.fixture(scope="module")
def alone(teacher: str) -> list[Curve]:
    values = runs(teacher)
    parts = run_ranks(curves, 1, values, STEPS)[0]
    return [whole([part], one) for part, one in zip(parts, values, strict=True)]


@pytest.mark.parametrize(
    "name",
    with_more(
        LAYOUTS, "zero3", "zero2, offloaded", "tp2, pp2", "zero1, deepspeed", product=["dp2", "zero1", "zero3, deepspeed"]
    ),
)
def test_every_layout_equals_one_process(name: str, alone: list[Curve], teacher: str) -> None:
    ranks, layout = LAYOUTS[name]
    values = runs(teacher, **layout)
    by_rank = run_ranks(curves, ranks, values, STEPS)
    for i, kind in enumerate(KINDS):
        losses, norms, weights = furthest(whole([parts[i] for parts in by_rank], values[i]), alone[i])
        assert losses < 1e-5 and norms < 1e-5 and weights < 1e-4, (kind, losses, norms, weights)
        assert alone[i].losses[-1] < alone[i].losses[0]


def test_the_divergence_falls_and_rows_say_so(tmp_path: Path, teacher: str) -> None:
    learns = {
        "train_iters": 40, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "save": str(tmp_path), "checkpoint_factor": 40,
        "eval_iters": 2, "eval_interval": 40, "save_best": "validation/divergence:min",
    }  # fmt: skip
    run_ranks(run_to_end, 1, student(teacher, learns, temperature=2.0))
    lines = map(json.loads, (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines())
    rows = [row for row in lines if "train/divergence" in row]
    found = [row["train/divergence"] for row in rows]
    assert len(rows) == 40 and found == pytest.approx([row["train/lm_loss"] for row in rows])
    validated = [row["validation/divergence"] for row in rows if "validation/divergence" in row]
    assert validated == pytest.approx([sum(found[-5:]) / 5], rel=0.3)
    assert sum(found[-5:]) < 0.3 * sum(found[:5]) and rows[-1]["train/nll"] < rows[0]["train/nll"]


def test_a_run_that_is_cut_off_goes_on_bit_for_bit(tmp_path: Path, teacher: str) -> None:
    common = student(teacher, {"train_iters": 6, "checkpoint_factor": 3}, beta=0.5, weight=0.5)
    assert_goes_on(1, common, tmp_path)
