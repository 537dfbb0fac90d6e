"""Validation loss is one number, whatever the layout; also for fewer samples than a batch."""

from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from megatron.data import unigram_entropy
from megatron.data.batch import collate_samples
from megatron.training.evaluation import ValidationResult, evaluate
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import LLAMA, NEOX, begin, config
from tests.training.test_layouts import LAYOUTS


def evaluations(rank: int, world_size: int, values: dict[str, Any]) -> list[ValidationResult]:
    """For the pool: the initial model on the first five, eight and sixteen validation samples."""
    training = begin(values)
    tokenizer, valid = training.tokenizer, training.datasets.valid
    assert valid is not None
    return [evaluate(training.engine, valid, n, tokenizer.eod, tokenizer.detokenize) for n in (5, 8, 16)]


def _values(model: dict[str, Any], layout: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    return config(model, layout, train_micro_batch_size_per_gpu=micro_batch, eval_iters=2)


@pytest.fixture(scope="module")
def one_process() -> dict[str, list[ValidationResult]]:
    models = {"neox": NEOX, "llama": LLAMA}
    return {name: run_ranks(evaluations, 1, _values(model, {}, 8))[0] for name, model in models.items()}


SOME, MORE = {"dp2 x pp2", "tp2 x pp2 +sp", "dp2 zero3"}, {"pp4", "dp4 zero3 by twos"}


@pytest.mark.parametrize("name", with_more(LAYOUTS, *MORE, product=LAYOUTS.keys() - SOME - MORE))
def test_same_in_every_layout(name: str, one_process: dict[str, list[ValidationResult]]) -> None:
    ranks, layout = LAYOUTS[name]
    model, values = ("llama", LLAMA) if "tp2" in name else ("neox", NEOX)
    everyone = run_ranks(evaluations, ranks, _values(values, layout, 2))
    assert all(results == everyone[0] for results in everyone), "every rank knows the result"
    for actual, expected in zip(everyone[0], one_process[model], strict=True):
        assert actual.lm_loss == pytest.approx(expected.lm_loss, rel=1e-6)
        assert actual.unigram_entropy == pytest.approx(expected.unigram_entropy, rel=1e-12)
        assert actual.tokens_per_character == expected.tokens_per_character


def direct(rank: int, world_size: int, values: dict[str, Any]) -> tuple[float, list[np.ndarray]]:
    """For the pool: mean loss of five samples, one at a time through the bare model, and their labels."""
    training = begin(values)
    assert training.datasets.valid is not None
    losses, labels = [], []
    for i in range(5):
        batch = collate_samples([training.datasets.valid[i]], eod=training.tokenizer.eod, eod_mask_loss=True)
        counts = batch.loss_weights[0] > 0
        logits = training.engine.stage(None, batch)[:, 0].double()  # type: ignore[index]
        losses.append(torch.nn.functional.cross_entropy(logits[counts], batch.labels[0][counts], reduction="sum"))
        labels.append(batch.labels[0][counts].numpy())
    return float(torch.stack(losses).sum()) / sum(map(len, labels)), labels


def test_against_the_bare_model(one_process: dict[str, list[ValidationResult]]) -> None:
    """Characters are those of the text of the labels that the loss is over; a document's end has none."""
    values, result = _values(NEOX, {}, 8), one_process["neox"][0]
    loss, labels = run_ranks(direct, 1, values)[0]
    assert result.lm_loss == pytest.approx(loss, rel=1e-6)
    assert result.unigram_entropy == pytest.approx(unigram_entropy(np.concatenate(labels)), rel=1e-12)
    library = tokenizers.Tokenizer.from_file(values["vocab_file"])
    characters = sum(len(library.decode(row.tolist(), skip_special_tokens=True)) for row in labels)
    assert result.tokens_per_character == pytest.approx(sum(map(len, labels)) / characters, rel=1e-12)
    assert 0.05 < result.tokens_per_character < 1.0
    assert result.character_perplexity == pytest.approx(np.exp(result.lm_loss * result.tokens_per_character))
