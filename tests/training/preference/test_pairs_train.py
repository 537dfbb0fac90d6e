"""Preferences from files to trained weights: what a run reads, that it learns, and that it goes on where it
stopped."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data import IndexedDatasetWriter
from megatron.data.preferences.preference_sets import preference_samples_per_epoch
from megatron.neox_arguments import NeoXArgs
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses, stop_after
from tests.training.runs import ADAMW, LLAMA, bit_equal, config, run_to_end


def pairs(folder: Path, count: int = 40) -> dict[str, Any]:
    """Chosen answers are even tokens, rejected ones odd; prompts tell nothing."""
    random, paths = np.random.default_rng(0), {}
    prompts = [random.integers(0, 300, random.integers(1, 6)) for _ in range(count)]
    for side, rest in (("pos", 0), ("neg", 1)):
        for kind in ("", "_label"):
            with IndexedDatasetWriter(str(folder / f"{side}{kind}"), np.int32) as writer:
                answers = np.random.default_rng(rest)
                for prompt in prompts:
                    answer = answers.integers(0, 150, answers.integers(2, 8)) * 2 + rest
                    masked = np.full_like(prompt, -100) if kind else prompt
                    writer.add_document(np.concatenate([masked, answer]).astype(np.int32))
            paths[f"{side}_train{kind}_data_paths"] = [str(folder / f"{side}{kind}")]
            paths[f"{side}_valid{kind}_data_paths"] = [str(folder / f"{side}{kind}")]
    return paths


LOGGED = (
    *(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")), "logps/chosen", "logps/rejected",
    "entropy", "mean_token_accuracy", "padding_share", "packing_efficiency", "trained_share",
)  # fmt: skip
RUNS = {
    "simpo packed": (1, {"pack_impl": "best_fit", "dpo_loss_type": "simpo"}),
    "simpo padded pp2": (2, {"pack_impl": "unpacked", "dpo_loss_type": "simpo", "pipe_parallel_size": 2}),
}


@pytest.mark.parametrize("name", with_more(RUNS, "simpo padded pp2"))
def test_a_run_learns_and_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    ranks, changes = RUNS[name]
    common = config(
        LLAMA, ADAMW, pairs(tmp_path), {"data_path": None, "split": "100,0,0", "eod_mask_loss": False},
        train_impl="dpo", dataset_impl="pairwise", dpo_beta=2.0, train_batch_size=4, train_micro_batch_size_per_gpu=2,
        train_iters=12, checkpoint_factor=6, eval_iters=1, eval_interval=12, **changes,
    )  # fmt: skip
    common = {key: value for key, value in common.items() if value is not None}
    common.pop("split")
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    whole = run_ranks(run_to_end, ranks, {**common, "save": str(through)})
    stopped = {**common, "save": str(resumed), "load": str(resumed)}
    run_ranks(stop_after, ranks, stopped, 6)
    went_on = run_ranks(run_to_end, ranks, stopped)
    assert losses(resumed) == losses(through)
    assert all(bit_equal(a[1], b[1]) for a, b in zip(whole, went_on, strict=True))
    step_losses = losses(through)
    assert step_losses[12] < 0.7 * step_losses[1]
    lines = (through / "logs" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "train/lm_loss" in row]
    assert {f"train/{metric}" for metric in LOGGED} <= set(rows[0])
    padding = np.array([row["train/padding_share"] for row in rows])
    assert padding == pytest.approx(1 - np.array([row["train/packing_efficiency"] for row in rows]))
    assert (padding.min() > 0.5) if "padded" in name else (0 < padding.mean() < 0.2), padding


def test_padded_pairs_and_shared_prompts_train_the_same(tmp_path: Path) -> None:
    """Steps of all pairs, each run with reference scores of its own making: losses and weights."""
    ends, data = [], pairs(tmp_path, 12)
    for changes in ({"pack_impl": "unpacked"}, {"pack_impl": "best_fit", "prefix_sharing": True}):
        save = tmp_path / changes["pack_impl"]
        keys = config(
            LLAMA, ADAMW, data, {"data_path": None, "split": None, "eod_mask_loss": False}, train_impl="dpo",
            dataset_impl="pairwise", dpo_loss_type=["sigmoid", "sft", "aot"], dpo_beta=2.0, train_iters=3,
            save=str(save), checkpoint_factor=3, reference_cache_dir=str(save / "references"), **changes,
        )  # fmt: skip
        keys = {key: value for key, value in keys.items() if value is not None}
        rows = preference_samples_per_epoch(NeoXArgs.from_dict({**keys, "train_batch_size": 1}))
        (end,) = run_ranks(run_to_end, 1, {**keys, "train_batch_size": rows, "train_micro_batch_size_per_gpu": 1})
        ends.append((rows, losses(save), end[1]))
    (alone, padded, weights), (few, shared, shared_weights) = ends
    assert alone == 12 > few and shared == pytest.approx(padded, rel=1e-5) and padded[3] < 0.9 * padded[1]
    for layer, tensors in weights.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(shared_weights[layer][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
