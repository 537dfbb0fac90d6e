"""Growing sequences: the same numbers in every layout, through a resume, and in the log."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses, stop_after
from tests.training.runs import ADAMW, LLAMA, NEOX, Curve, bit_equal, config, curves, furthest, run_to_end, whole

# Lengths 8, 16, 16, 24, 24, 32, 32, ...: one that stays, ones that change, and the whole.
CURRICULUM = {
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 8},
    }
}
LENGTHS = [8, 16, 16, 24, 24, 32, 32, 32]
TP2, PP2 = {"model_parallel_size": 2}, {"pipe_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 zero1": (2, {"zero_optimization": {"stage": 1}}),
    "dp2 zero3": (2, {"zero_optimization": {"stage": 3}}),
    "tp2 +sp": (2, TP2 | {"sequence_parallel": True}),
    "pp2": (2, PP2),
    "tp2 x pp2 +sp": (4, TP2 | PP2 | {"sequence_parallel": True}),
    "recomputing": (1, {"checkpoint_activations": True}),
}


def values(model: dict[str, Any] = NEOX, **more: Any) -> dict[str, Any]:
    return config(model, ADAMW, CURRICULUM, {"train_micro_batch_size_per_gpu": 2, **more})


@pytest.fixture(scope="module")
def references() -> dict[str, Curve]:
    """One process, one micro-batch of 8."""
    configs = [values(model, train_micro_batch_size_per_gpu=8) for model in (NEOX, LLAMA)]
    part = run_ranks(curves, 1, configs, 8, timeout=120)[0]
    return {name: whole([p], c) for name, p, c in zip(("neox", "llama"), part, configs, strict=True)}


@pytest.mark.parametrize(
    "name",
    with_more(LAYOUTS, "tp2 +sp", "tp2 x pp2 +sp"),
)
def test_layout_equals_one_process(name: str, references: dict[str, Curve]) -> None:
    ranks, layout = LAYOUTS[name]
    configs = [values(model, **layout) for model in (NEOX, LLAMA)]
    everyone = run_ranks(curves, ranks, configs, 8, timeout=120)
    for i, model in enumerate(references):
        differences = furthest(whole([parts[i] for parts in everyone], configs[i]), references[model])
        assert differences[0] <= 1e-5 and differences[1] <= 1e-5 and differences[2] <= 1e-4


def test_short_sequences_change_the_run(references: dict[str, Curve]) -> None:
    plain = values(train_micro_batch_size_per_gpu=8, curriculum_learning=None)
    curve = whole([run_ranks(curves, 1, [plain], 8)[0][0]], plain)
    assert furthest(curve, references["neox"])[0] > 1e-2


@pytest.mark.parametrize("name", with_more(["dp2 zero1", "pp2"], "dp2 zero1"))
def test_resume_and_log(name: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    common = values(train_iters=8, checkpoint_factor=3, hidden_dropout=0.1, **layout)
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    straight = run_ranks(run_to_end, ranks, {**common, "save": str(through)})
    stopped = {**common, "save": str(resumed)}
    run_ranks(stop_after, ranks, stopped, 3)
    went_on = run_ranks(run_to_end, ranks, stopped)
    assert losses(resumed) == losses(through) and len(losses(resumed)) == 8
    assert all(bit_equal(a[1], b[1]) for a, b in zip(straight, went_on, strict=True))
    rows = [json.loads(line) for line in (resumed / "logs" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "train/lm_loss" in row]
    assert [row["curriculum_seqlen"] for row in rows] == LENGTHS
    assert [row["consumed_tokens"] for row in rows] == [8 * sum(LENGTHS[: i + 1]) for i in range(8)]
    speeds = [row["runtime/tokens_per_sec"] / row["runtime/samples_per_sec"] for row in rows]
    assert speeds == pytest.approx(LENGTHS)
