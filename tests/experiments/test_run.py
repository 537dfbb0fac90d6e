"""`from megatron import Run`: metrics, configuration, models and batches of a run, and its data order."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron import Run
from megatron.experiments.errors import RunError
from megatron.experiments.find_text import Occurrence
from megatron.experiments.past_run import Span
from megatron.experiments.sightings import sightings
from tests.experiments.test_replay import SMALL, SOURCES
from tests.pool import run_ranks
from tests.training.runs import run_to_end
from tools.datasets import order


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of 8 samples, resumed on two ranks with batches of 16."""
    save = tmp_path_factory.mktemp("run") / "run"
    values = {**SMALL, "save": str(save), "checkpoint_factor": 2, "extra_save_iters": None}
    run_ranks(run_to_end, 1, {**values, "train_iters": 2})
    run_ranks(run_to_end, 2, {**values, "train_iters": 6, "train_batch_size": 16})
    return save


def test_a_run_is_read_from_its_folder(saved: Path) -> None:
    run = Run.load(saved)
    assert [row["iteration"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert (run.config.train_iters, run.config.train_batch_size) == (6, 16)
    assert list(run.checkpoints) == [2, 4, 6] and run.last_step == 6
    assert run.spans == [Span(1, 2, 0, 8, 2), Span(3, 4, 16, 16, 4), Span(5, 6, 48, 16, 6)]
    assert run.span_of(3).samples(3) == range(16, 32)
    with pytest.raises(RunError, match="1 to 6"):
        run.span_of(7)


def test_steps_of_the_run_that_was_loaded_are_not_this_run_s(saved: Path, tmp_path: Path) -> None:
    values = {**SMALL, "load": str(saved), "iteration": 2, "save": str(tmp_path), "train_batch_size": 4}
    run_ranks(run_to_end, 1, {**values, "train_iters": 4, "checkpoint_factor": 2, "extra_save_iters": None})
    run = Run.load(tmp_path)
    assert run.spans == [Span(3, 4, 16, 4, 4)]
    assert run.batch(3).tokens.tolist() == Run.load(saved).batch(3).tokens[:4].tolist()
    assert not any(row.step < 3 for rows in sightings(run.data(4), 0, [Occurrence(0, 0, 9)], 4) for row in rows)
    with pytest.raises(RunError, match="3 to 4; earlier ones are of the run"):
        run.span_of(2)


def test_batches_follow_the_configuration_of_their_step(saved: Path) -> None:
    run = Run.load(saved)
    assert run.batch(2).tokens.shape == (8, 32) and run.batch(3).tokens.shape == (16, 32)
    assert [row.rank for row in run.data(2).rows(2)] == [0] * 8
    assert [row.rank for row in run.data(3).rows(3)] == [0, 0, 1, 1] * 4
    tokens = torch.cat([run.batch(step).tokens for step in (1, 2, 3)])
    dataset = run.data(6).dataset
    assert tokens.tolist() == [dataset[sample].tokens[:-1].tolist() for sample in range(32)]


def test_a_model_gives_logits_of_the_checkpoint(saved: Path) -> None:
    run = Run.load(saved)
    model, batch = run.model(2), run.batch(3)
    assert not model.training
    with torch.no_grad():
        logits = model(batch.tokens)
    assert logits.shape == (*batch.tokens.shape, model.tokenizer.vocab_size)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    weights = batch.loss_weights.flatten()
    loss = float((losses * weights).sum() / weights.sum())
    assert loss == pytest.approx(run.metrics[2]["train/lm_loss"], rel=0.05)  # the padded vocabulary counts there
    with pytest.raises(RunError, match="2, 4, 6"):
        run.model(3)


def test_a_folder_without_a_run_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="no checkpoint"):
        Run.load(tmp_path)


def test_the_order_is_published(saved: Path, tmp_path: Path) -> None:
    table, lines = tmp_path / "order.npy", tmp_path / "order.jsonl"
    assert order.main([str(saved), "--output", str(table)]) == 0
    assert order.main([str(saved), "--output", str(lines), "--last", "4"]) == 0
    records = np.load(table, mmap_mode="r")
    assert json.loads((tmp_path / "order.json").read_text())["sources"] == SOURCES
    data = Run.load(saved).data(6)
    expected = [
        (step, row.row, piece.source, piece.document, piece.offset, piece.place, piece.count)
        for step in range(1, 7)
        for row in Run.load(saved).data(step).rows(step)
        for piece in row.pieces
    ]
    assert records.tolist() == expected
    samples = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(sample["step"], sample["row"]) for sample in samples][-1] == (4, 15)
    flat = [(s["step"], s["row"], data.sources.index(p["source"]), p["document"], p["offset"], p["place"], p["tokens"])
            for s in samples for p in s["pieces"]]  # fmt: skip
    assert flat == [record for record in expected if record[0] <= 4]
    assert order.main([str(saved), "--output", str(tmp_path / "order.csv")]) == 1


def test_import_megatron_stays_cheap() -> None:
    code = "import sys, megatron; print([n for n in sys.modules if n.startswith(('megatron.', 'torch', 'numpy'))])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"
