"""Growing sequences, and phases of row lengths: the same numbers in every layout, through a resume, and in
the log."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.training.checkpoint.resume import TrainingProgress
from megatron.training.loop import _advance
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses, stop_after
from tests.training.runs import (
    ADAMW,
    LLAMA,
    NEOX,
    TABLE,
    Curve,
    assert_alike,
    bit_equal,
    cells,
    config,
    curves_of,
    furthest,
    metric_rows,
    run_to_end,
)

CURRICULUM: dict[str, Any] = {
    "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32,
    "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 8},
}  # fmt: skip
PHASES: dict[str, Any] = {
    "seq_curriculum": {"seq_len": [8, 16, 32], "until": [2, 5]}, "reset_attention_mask": True,
    "reset_position_ids": True,
}  # fmt: skip
# Keys, and the lengths of steps: one that stays, ones that change, and the whole.
KINDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "growing": ({"curriculum_learning": CURRICULUM}, [8, 16, 16, 24, 24, 32, 32, 32]),
    "phases": (PHASES, [8, 8, 16, 16, 16, 32, 32, 32]),
}
STEPS = 6


def curves_in(ranks: int, layout: dict[str, Any]) -> dict[tuple[str, str], Curve]:
    """Of both kinds and of two models."""
    models = {"neox": NEOX, "llama": LLAMA}
    configs = {
        (kind, name): config(model, ADAMW, keys, {"train_micro_batch_size_per_gpu": 2, **layout})
        for kind, (keys, _) in KINDS.items() for name, model in models.items()
    }  # fmt: skip
    return curves_of(configs, STEPS, ranks)


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str], Curve]:
    """One process, one micro-batch of 8."""
    return curves_in(1, {"train_micro_batch_size_per_gpu": 8})


@pytest.mark.parametrize("name", cells(["zero3", "tp2 pp2 sp"], ["tp2 sp"], ["zero1", "pp2"]))
def test_layout_equals_one_process(name: str, references: dict[tuple[str, str], Curve]) -> None:
    assert_alike(curves_in(*TABLE[name]), references)


def test_short_sequences_change_the_run(references: dict[tuple[str, str], Curve]) -> None:
    plain = curves_of({"plain": config(NEOX, ADAMW, train_micro_batch_size_per_gpu=8)}, STEPS)["plain"]
    for kind in KINDS:
        assert furthest(plain, references[kind, "neox"])[0] > 1e-3


@pytest.mark.parametrize(("kind", "layout"), cells([("growing", "pp2"), ("phases", "pp2")], [("growing", "zero1")]))
def test_resume_and_log(kind: str, layout: str, tmp_path: Path) -> None:
    """Stopped after four steps, which is inside a phase."""
    keys, lengths = KINDS[kind]
    ranks, more = TABLE[layout]
    run = {"train_micro_batch_size_per_gpu": 2, "train_iters": 8, "checkpoint_factor": 4, "hidden_dropout": 0.1}
    common = config(NEOX, ADAMW, keys, run, more)
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    straight = run_ranks(run_to_end, ranks, {**common, "save": str(through)})
    stopped = {**common, "save": str(resumed)}
    run_ranks(stop_after, ranks, stopped, 4)
    went_on = run_ranks(run_to_end, ranks, stopped)
    assert losses(resumed) == losses(through) and len(losses(resumed)) == 8
    assert all(bit_equal(a[1], b[1]) for a, b in zip(straight, went_on, strict=True))
    rows = metric_rows(resumed)
    assert [row["curriculum_seqlen"] for row in rows] == lengths
    if kind == "phases":
        assert [row["consumed_tokens"] for row in rows] == [8 * 32 * i for i in range(1, 9)]
        assert [row["curriculum_tokens"] for row in rows] == [256 * n for n in (1, 2, 1, 2, 3, 1, 2, 3)]
    else:
        assert [row["consumed_tokens"] for row in rows] == [8 * sum(lengths[: i + 1]) for i in range(8)]
        speeds = [row["runtime/tokens_per_sec"] / row["runtime/samples_per_sec"] for row in rows]
        assert speeds == pytest.approx(lengths)


def test_what_was_read_is_said_when_a_phase_ends() -> None:
    lines: list[str] = []
    args = NeoXArgs.from_dict(config(NEOX, PHASES, train_micro_batch_size_per_gpu=2))
    training = SimpleNamespace(args=args, progress=TrainingProgress(), logger=SimpleNamespace(info=lines.append))
    for _ in range(8):
        _advance(training, "train", None)  # type: ignore[arg-type]
    for line, facts in zip(lines, (("512", "8", "16", "3"), ("768", "16", "32", "6")), strict=True):
        assert line.startswith("seq_curriculum: ") and tuple(re.findall(r"\d+", line)) == facts
    assert training.progress.row_tokens == {8: 512, 16: 768, 32: 768} and training.progress.consumed_tokens == 2048
