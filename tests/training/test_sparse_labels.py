"""Data with few trained tokens: micro-batches, ranks and whole steps without any."""

import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import IndexedDatasetWriter
from megatron.launch import process_info
from megatron.neox_arguments import NeoXArgs
from megatron.training import start, train
from megatron.training.loop import batches_of
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import LLAMA, begin, bit_equal, config

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"model_parallel_size": 2}),
    "pp2": (2, {"pipe_parallel_size": 2}),
    "zero1": (2, {"zero_optimization": {"stage": 1}}),
    "zero3": (2, {"zero_optimization": {"stage": 3}}),
}


def chats(folder: Path, lengths: list[int], trained: int) -> dict[str, Any]:
    """Documents of random tokens, the last few of each trained; keys of a run on them."""
    chance = np.random.default_rng(3)
    text, labels = (folder / name for name in ("text_document", "label_document"))
    with IndexedDatasetWriter(text, np.int32) as ids, IndexedDatasetWriter(labels, np.int32) as marks:
        for length in lengths:
            document = chance.integers(2, 380, length).astype(np.int32)
            ids.add_document(document)
            marks.add_document(np.where(np.arange(length) >= length - trained, document, -100).astype(np.int32))
    return {
        "data_path": None, "train_data_paths": [str(text)], "train_label_data_paths": [str(labels)],
        "pack_impl": "packed", "seq_length": 64, "max_position_embeddings": 64, "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1, "eod_mask_loss": False, "train_iters": 6, "num_workers": 0,
        "lr_decay_style": "linear",
    }  # fmt: skip


def run(rank: int, world_size: int, values: dict[str, Any]) -> str:
    """For the pool: what a whole run prints."""
    with redirect_stdout(io.StringIO()) as output:
        training = start(NeoXArgs.from_dict(values), process_info())
        train(training)
    training.engine.close()
    return output.getvalue()


def rows_of(save: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (save / "logs" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "train/learning_rate" in row]


def steps_of(layout: str, values: dict[str, Any], folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """What a run in a layout says, and its rows of metrics."""
    ranks, keys = LAYOUTS[layout]
    more = {"save": str(folder / layout), "checkpoint_factor": 100}
    return run_ranks(run, ranks, config(values, keys, more))[0], rows_of(folder / layout)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """24 chats of 200 tokens, the last three trained, in rows of 64: two of three rows have none, and some
    steps."""
    return config(LLAMA, chats(tmp_path_factory.mktemp("sparse"), [200] * 24, 3))


@pytest.fixture(scope="module")
def alone(sparse: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    output, rows = steps_of("alone", sparse, tmp_path_factory.mktemp("runs"))
    losses = [row["train/lm_loss"] for row in rows]
    untrained = [n for n, loss in enumerate(losses, 1) if math.isnan(loss)]
    assert untrained and len(untrained) < len(losses) == 6
    assert f"step {untrained[0]}: none of its tokens is trained (labels mask all of them), left out" in output
    assert "run finished at iteration 6" in output and "not finite" not in output
    assert f"number of skipped iterations: {1:3d} |" in output
    rates = [row["train/learning_rate"] for row in rows]
    assert len(set(rates)) == len(rates), "the rate goes on"
    return rows


@pytest.mark.parametrize("layout", with_more([name for name in LAYOUTS if name != "alone"], "dp2", "zero1"))
def test_ranks_and_steps_without_a_trained_token(layout: str, sparse, alone, tmp_path: Path) -> None:
    """A rank without one contributes zero, a step without one changes nothing; as in one process."""
    output, rows = steps_of(layout, sparse, tmp_path)
    assert "run finished at iteration 6" in output
    for key in ("train/lm_loss", "train/grad_norm", "train/learning_rate"):
        ours, theirs = ([row[key] for row in run_rows] for run_rows in (rows, alone))
        assert ours == pytest.approx(theirs, rel=1e-5, nan_ok=True), key


def test_a_step_without_a_trained_token_is_no_overflow(sparse, tmp_path: Path) -> None:
    """fp16: the loss scale stays, and the weights, which would otherwise decay."""
    nothing = chats(tmp_path, [200] * 24, 0)
    output, rows = steps_of("alone", config(sparse, nothing, precision="fp16", fp16={"hysteresis": 1}), tmp_path)
    assert len({row["train/loss_scale"] for row in rows}) == 1 and len(rows) == 6
    assert "step 4: none of its tokens is trained (labels mask all of them), left out; 4 such steps so far" in output


def weights_after(rank: int, world_size: int, values: dict[str, Any]) -> tuple[Any, Any]:
    """For the pool: weights before and after three steps."""
    training = begin(values)
    batches, before = batches_of(training), training.engine.weights(master=True)
    before = {layer: {k: v.clone() for k, v in tensors.items()} for layer, tensors in before.items()}
    results = [training.engine.train_step(next(batches), 1e-2) for _ in range(3)]
    assert all(result.untrained and result.skipped for result in results)
    after = {layer: {k: v.clone() for k, v in t.items()} for layer, t in training.engine.weights(master=True).items()}
    training.engine.close()
    return before, after


@pytest.mark.parametrize("layout", ["alone", "pp2", "zero1", "zero3"])
def test_nothing_is_updated_by_nothing(layout: str, tmp_path: Path) -> None:
    """Not even by weight decay or momenta."""
    ranks, keys = LAYOUTS[layout]
    values = config(LLAMA, chats(tmp_path, [200] * 24, 0), keys, weight_decay=0.5)
    for before, after in run_ranks(weights_after, ranks, values):
        assert bit_equal(before, after)
