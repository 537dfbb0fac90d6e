"""Reports of steps whose loss or gradient norm stands out (`log_spikes_above_sigma`)."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import IndexedDatasetWriter, build_datasets
from megatron.data.provenance import pieces_of
from megatron.neox_arguments import NeoXArgs
from megatron.training import train
from megatron.training.nonfinite_guard import SpikeGuard
from tests.pool import run_ranks
from tests.training.runs import LLAMA, TABLE, begin, cells, config, metric_rows

STEPS, PLANTED = 27, 26  # the last step that is fed, and the one with the planted document
TEXT, GARBAGE = np.arange(10, 21), np.array([371, 120, 333, 207, 98, 301, 150, 266, 92, 345, 180])


def write(prefix: Path, documents: int, planted: int | None = None) -> None:
    """A corpus of one easy text, over and over; one document holds rare tokens in its place."""
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for document in range(documents):
            writer.add_document(GARBAGE if document == planted else TEXT)


def values_of(folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    return config(
        LLAMA, layout, data_path=None, train_data_paths=[str(folder / "easy"), str(folder / "mixed")],
        train_iters=STEPS, train_micro_batch_size_per_gpu=2, log_spikes_above_sigma=6.0, eod_mask_loss=False,
        save=str(folder / "run"), checkpoint_factor=STEPS, index_cache_dir=str(folder / "maps"),
        optimizer={"type": "AdamW", "params": {"lr": 1e-2}},
    )  # fmt: skip


def planted_of(values: dict[str, Any]) -> int:
    """A document of the second source, in the middle of a row that step PLANTED reads."""
    args = NeoXArgs.from_dict({**values, "padded_vocab_size": 384})
    train_set = build_datasets(args, train_batch_size=8, on_one_rank=lambda work: work()).train
    rows = [list(pieces_of(train_set, row)) for row in range((PLANTED - 1) * 8, PLANTED * 8)]
    return next(row[1].document for row in rows if row[1].source == 1)


def run(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: a run that compares with the last 6 steps."""
    SpikeGuard.WINDOW = SpikeGuard.MIN_LOSSES = 6
    training = begin(values)
    train(training)
    training.engine.close()


@pytest.mark.parametrize(
    "name", cells(["dp2"], ["plain", "pp2", "tp2", "cp2", "zero3", "zero1, deepspeed", "pp2, deepspeed"])
)
def test_a_planted_document_is_named(name: str, tmp_path: Path) -> None:
    """Also by a run that was resumed after its recent steps: they are restored."""
    ranks, layout = (2, {"context_parallel_size": 2}) if name == "cp2" else TABLE[name]
    values = values_of(tmp_path, layout)
    write(tmp_path / "easy", 800)
    write(tmp_path / "mixed", 400)
    planted = planted_of(values)
    write(tmp_path / "mixed", 400, planted)
    run_ranks(run, ranks, {**values, "exit_interval": PLANTED - 3, "checkpoint_factor": PLANTED - 3})
    assert not (tmp_path / "run/logs/spikes.jsonl").read_text()
    run_ranks(run, ranks, values)
    spike = json.loads((tmp_path / "run/logs/spikes.jsonl").read_text().splitlines()[0])
    worst, *other_rows = spike["rows"]
    assert spike["iteration"] == PLANTED and spike["samples"][0] <= worst["sample"] < spike["samples"][1]
    document = worst["documents"][0]
    assert (document["source"], document["document"], document["tokens"]) == ("mixed", planted, len(GARBAGE))
    assert document["loss"] > 5 * max(document["loss"] for document in worst["documents"][1:])
    assert worst["loss"] > 5 * max(row["loss"] for row in other_rows) and worst["text"]
    row = metric_rows(tmp_path / "run")[PLANTED - 1]
    assert spike["loss"] == pytest.approx(row["train/lm_loss"], rel=1e-6) and "loss" in spike["high"]
    norms = spike["layer_grad_norms"].values()
    assert math.sqrt(sum(norm**2 for norm in norms)) == pytest.approx(row["train/grad_norm"], rel=1e-5)
