"""Preferences from files to weights: what a run reads and logs, and goes on. Learning: test_rewards.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import IndexedDatasetWriter
from tests.training.checkpoint.test_resume import assert_goes_on, metrics
from tests.training.runs import ADAMW, LLAMA, cells, config


def pairs(folder: Path, count: int = 40) -> dict[str, Any]:
    """Chosen answers are even tokens, rejected ones odd; prompts tell nothing."""
    random, paths = np.random.default_rng(0), {}
    prompts = [random.integers(0, 300, random.integers(1, 6)) for _ in range(count)]
    for side, parity in (("pos", 0), ("neg", 1)):
        for kind in ("", "_label"):
            with IndexedDatasetWriter(str(folder / f"{side}{kind}"), np.int32) as writer:
                answers = np.random.default_rng(parity)
                for prompt in prompts:
                    answer = answers.integers(0, 150, answers.integers(2, 8)) * 2 + parity
                    masked = np.full_like(prompt, -100) if kind else prompt
                    writer.add_document(np.concatenate([masked, answer]).astype(np.int32))
            paths[f"{side}_train{kind}_data_paths"] = [str(folder / f"{side}{kind}")]
            paths[f"{side}_valid{kind}_data_paths"] = [str(folder / f"{side}{kind}")]
    return paths


def pairwise(data: dict[str, Any], *parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """A run of DPO on pairs, unless `parts` say otherwise; without keys that are None."""
    common = {"data_path": None, "split": None, "eod_mask_loss": False, "dataset_impl": "pairwise"}
    values = config(LLAMA, ADAMW, data, common, {"train_impl": "dpo", "train_batch_size": 4}, *parts, **overrides)
    return {key: value for key, value in values.items() if value is not None}


LOGGED = (
    *(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")), "logps/chosen", "logps/rejected",
    "entropy", "mean_token_accuracy", "padding_share", "packing_efficiency", "trained_share",
)  # fmt: skip


@pytest.mark.parametrize(("look", "pipe"), cells([("best_fit", 0)], product=[("unpacked", 2)]))
def test_a_run_goes_on_bit_for_bit(look: str, pipe: int, tmp_path: Path) -> None:
    simpo = {"dpo_loss_type": "simpo", "dpo_beta": 2.0, "pack_impl": look, "pipe_parallel_size": pipe}
    steps = {"train_iters": 6, "checkpoint_factor": 3, "eval_iters": 1, "eval_interval": 6}
    assert_goes_on(max(pipe, 1), pairwise(pairs(tmp_path), simpo, steps, train_micro_batch_size_per_gpu=2), tmp_path)
    rows = [row for row in metrics(tmp_path / "through") if "train/lm_loss" in row]
    assert {f"train/{metric}" for metric in LOGGED} <= set(rows[0])
    padding = np.array([row["train/padding_share"] for row in rows])
    assert padding == pytest.approx(1 - np.array([row["train/packing_efficiency"] for row in rows]))
    assert (padding.min() > 0.5) if look == "unpacked" else (0 < padding.mean() < 0.2), padding
