"""Phases of row lengths: the same numbers in every layout, through a resume inside a phase, and in the
log."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.training.checkpoint.resume import TrainingProgress
from megatron.training.loop import _advance
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses, stop_after
from tests.training.runs import ADAMW, LLAMA, NEOX, Curve, bit_equal, config, curves, furthest, run_to_end, whole
from tests.training.test_curriculum import LAYOUTS

PHASES = {"seq_curriculum": {"seq_len": [8, 16, 32], "until": [2, 5]}}
ROWS = [8, 8, 16, 16, 16, 32, 32, 32]


def values(model: dict[str, Any] = NEOX, **more: Any) -> dict[str, Any]:
    resets = {"reset_attention_mask": True, "reset_position_ids": True}
    return config(model, ADAMW, PHASES, resets, {"train_micro_batch_size_per_gpu": 2, **more})


@pytest.fixture(scope="module")
def references() -> dict[str, Curve]:
    """One process, one micro-batch of 8."""
    configs = [values(model, train_micro_batch_size_per_gpu=8) for model in (NEOX, LLAMA)]
    part = run_ranks(curves, 1, configs, 8, timeout=120)[0]
    return {name: whole([p], c) for name, p, c in zip(("neox", "llama"), part, configs, strict=True)}


@pytest.mark.parametrize("name", ["dp2 zero3", "tp2 x pp2 +sp"])
def test_layout_equals_one_process(name: str, references: dict[str, Curve]) -> None:
    ranks, layout = LAYOUTS[name]
    configs = [values(model, **layout) for model in (NEOX, LLAMA)]
    everyone = run_ranks(curves, ranks, configs, 8, timeout=120)
    for i, model in enumerate(references):
        differences = furthest(whole([parts[i] for parts in everyone], configs[i]), references[model])
        assert differences[0] <= 1e-5 and differences[1] <= 1e-5 and differences[2] <= 1e-4


def test_resume_inside_a_phase_and_log(tmp_path: Path) -> None:
    ranks, layout = LAYOUTS["pp2"]
    common = values(train_iters=8, checkpoint_factor=4, hidden_dropout=0.1, **layout)
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    straight = run_ranks(run_to_end, ranks, {**common, "save": str(through)})
    stopped = {**common, "save": str(resumed)}
    run_ranks(stop_after, ranks, stopped, 4)
    went_on = run_ranks(run_to_end, ranks, stopped)
    assert losses(resumed) == losses(through) and len(losses(resumed)) == 8
    assert all(bit_equal(a[1], b[1]) for a, b in zip(straight, went_on, strict=True))
    rows = [json.loads(line) for line in (resumed / "logs" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "train/lm_loss" in row]
    assert [row["curriculum_seqlen"] for row in rows] == ROWS
    assert [row["consumed_tokens"] for row in rows] == [8 * 32 * i for i in range(1, 9)]
    assert [row["curriculum_tokens"] for row in rows] == [256 * n for n in (1, 2, 1, 2, 3, 1, 2, 3)]


def test_what_was_read_is_said_when_a_phase_ends() -> None:
    lines: list[str] = []
    training = SimpleNamespace(
        args=NeoXArgs.from_dict(values()), progress=TrainingProgress(), logger=SimpleNamespace(info=lines.append)
    )
    for _ in range(8):
        _advance(training, "train", None)  # type: ignore[arg-type]
    assert lines == [
        "seq_curriculum: 512 tokens were read in rows of 8; rows of 16 from iteration 3 on",
        "seq_curriculum: 768 tokens were read in rows of 16; rows of 32 from iteration 6 on",
    ]
    assert training.progress.row_tokens == {8: 512, 16: 768, 32: 768} and training.progress.consumed_tokens == 2048
