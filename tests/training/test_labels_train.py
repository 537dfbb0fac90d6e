"""Runs on labelled documents, from keys to losses: the same in every layout, and told what is not listed."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import IndexedDataset
from megatron.launch import process_info
from megatron.neox_arguments import NeoXArgs
from megatron.training import start, train
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, LLAMA, config, curves

CHAT, INSTRUCT = (str(GOLDEN / "dataset" / name) for name in ("chat_conversation", "instruct_text"))
LABELS = (f"{CHAT}_label_document", str(GOLDEN / "dataset" / "instruct_label_document"))
SFT: dict[str, Any] = {
    "data_path": None, "train_data_paths": [f"{CHAT}_document", f"{INSTRUCT}_document"],
    "valid_data_paths": [f"{CHAT}_document"], "test_data_paths": [f"{CHAT}_document"],
    "train_label_data_paths": LABELS, "valid_label_data_paths": LABELS[:1], "test_label_data_paths": LABELS[:1],
    "pack_impl": "best_fit", "reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": False,
    "seq_length": 128, "max_position_embeddings": 128, "train_micro_batch_size_per_gpu": 2,
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2 sp": (2, {"model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipe_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return run_ranks(curves, 1, [config(LLAMA, SFT)], 3)[0][0].losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_labelled_rows_train_alike_in_every_layout(name: str, plain: list[float]) -> None:
    ranks, layout = LAYOUTS[name]
    for rank_curves in run_ranks(curves, ranks, [config(LLAMA, SFT, layout)], 3):
        assert rank_curves[0].losses == pytest.approx(plain, rel=1e-5)


def test_labels_change_what_is_trained(plain: list[float]) -> None:
    unlabelled = {key: None for key in SFT if "label" in key}
    assert run_ranks(curves, 1, [config(LLAMA, SFT, unlabelled)], 3)[0][0].losses != pytest.approx(plain, rel=1e-3)


def first_lines(rank: int, world_size: int, values: dict[str, Any]) -> str:
    """For the pool: what a run says before its first step."""
    with redirect_stdout(io.StringIO()) as output:
        start(NeoXArgs.from_dict(values), process_info()).engine.close()
    return output.getvalue()


def test_labels_that_are_not_listed_are_named_at_start() -> None:
    values = config(LLAMA, SFT, train_label_data_paths=None, train_iters=1)
    outputs = run_ranks(first_lines, 2, values)
    lines = [line for line in outputs[0].splitlines() if "all tokens are trained" in line]
    assert len(lines) == 2 and all("train_label_data_paths" in line and "would mask" in line for line in lines)
    assert "all tokens are trained" not in outputs[1], "said once"


def said_by(rank: int, world_size: int, values: dict[str, Any]) -> str:
    """For the pool: what a whole run prints."""
    with redirect_stdout(io.StringIO()) as output:
        training = start(NeoXArgs.from_dict(values), process_info())
        train(training)
    training.engine.close()
    return output.getvalue()


@pytest.mark.parametrize("name", ["dp2", "pp2"])
def test_padding_and_trained_tokens_are_said_and_logged(name: str, tmp_path: Path) -> None:
    """At the start of all rows, and of each step; here one step is all rows."""
    text, labels = (IndexedDataset(path) for path in (f"{CHAT}_document", LABELS[0]))
    used = np.minimum(text.sizes, 129)
    ranks, layout = LAYOUTS[name]
    values = config(
        LLAMA, SFT, layout, train_data_paths=[f"{CHAT}_document"], train_label_data_paths=LABELS[:1], train_iters=1,
        train_batch_size=len(text), train_micro_batch_size_per_gpu=2, pack_impl="unpacked", save=str(tmp_path),
        checkpoint_factor=1, eval_iters=1,
    )  # fmt: skip
    output = run_ranks(said_by, ranks, values)[0]
    trained = sum(int((labels.get(i, 1, int(count) - 1) >= 0).sum()) for i, count in enumerate(used))
    padding, share = 1 - used.sum() / (24 * 129), trained / used.sum()
    assert (
        f"chat_conversation_document.bin: 24 documents in 24 rows of 128 tokens, 24.0 documents a step on average; "
        f"{100 * padding:.1f} % padding, {100 * share:.1f} % of the tokens are trained" in output
    )
    rows = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if "train/lm_loss" in row]
    places = np.minimum(text.sizes, 128)
    assert row["train/padding_share"] == pytest.approx(1 - places.sum() / (24 * 128))
    assert row["train/packing_efficiency"] == pytest.approx(places.sum() / (24 * 128))
    assert row["train/trained_share"] == pytest.approx(trained / places.sum())
    assert 0 <= row["train/mean_token_accuracy"] < 0.1 and 5.0 < row["train/entropy"] < 6.0
    assert row["validation/lm_loss_ppl"] > 1
    # Before the first step validation sees what that step sees
    (before,) = [row for row in rows if row["iteration"] == 0]
    for metric in ("lm_loss", "entropy", "mean_token_accuracy"):
        assert before[f"validation/{metric}"] == pytest.approx(row[f"train/{metric}"], rel=1e-5)
    assert " mean_token_accuracy value: " in output and "validation/mean_token_accuracy" in row


def test_a_split_of_listed_sets_trains_and_validates(tmp_path: Path) -> None:
    """The first 18 of 24 chats, with their labels, are trained on, and the others validated with."""
    text, labels = (IndexedDataset(path) for path in (f"{CHAT}_document", LABELS[0]))
    listed = {
        "train_data_paths": [f"{CHAT}_document"], "train_label_data_paths": LABELS[:1], "valid_data_paths": None,
        "test_data_paths": None, "valid_label_data_paths": None, "test_label_data_paths": None,
    }  # fmt: skip
    values = config(
        LLAMA, SFT, listed, split="75,25,0", train_iters=1, eval_iters=3, eval_interval=1, pack_impl="unpacked",
        save=str(tmp_path), checkpoint_factor=1, train_batch_size=2,
    )  # fmt: skip
    (output,) = run_ranks(said_by, 1, values)
    used = np.minimum(text.sizes[:18], 129)
    trained = sum(int((labels.get(i, 1, int(count) - 1) >= 0).sum()) for i, count in enumerate(used))
    assert "18 documents in 18 rows of 128 tokens, 2.0 documents a step on average; " in output
    assert f"{100 * trained / used.sum():.1f} % of the tokens are trained" in output
    rows = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert any("validation/lm_loss" in row for row in rows)
