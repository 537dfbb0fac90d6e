"""Validation loss is one number, whatever the layout; also for fewer samples than a batch."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron.data import unigram_entropy
from megatron.training.evaluation import ValidationResult, evaluate
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import LLAMA, NEOX, begin, config
from tests.training.test_layouts import LAYOUTS


def evaluations(rank: int, world_size: int, values: dict[str, Any], samples: list[int]) -> list[ValidationResult]:
    """For the pool: the initial model on the first so many validation samples."""
    training = begin(values)
    assert training.datasets.valid is not None
    return [evaluate(training.engine, training.datasets.valid, n, training.tokenizer.eod) for n in samples]


def _values(model: dict[str, Any], layout: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    return config(model, layout, train_micro_batch_size_per_gpu=micro_batch, eval_iters=2)


@pytest.fixture(scope="module")
def one_process() -> dict[str, list[ValidationResult]]:
    models = {"neox": NEOX, "llama": LLAMA}
    return {name: run_ranks(evaluations, 1, _values(model, {}, 8), [5, 8, 16])[0] for name, model in models.items()}


SOME = ("dp2 x pp2", "tp2 x pp2 +sp", "dp2 zero1", "dp2 zero3")
MORE = ("tp2+sp", "pp4", "dp4 zero2", "dp2 x tp2 +sp zero3", "dp4 zero3 by twos")


@pytest.mark.parametrize("name", with_more(LAYOUTS, *MORE, product=LAYOUTS.keys() - {*SOME, *MORE}))
def test_same_in_every_layout(name: str, one_process: dict[str, list[ValidationResult]]) -> None:
    ranks, layout = LAYOUTS[name]
    model, values = ("llama", LLAMA) if "tp2" in name else ("neox", NEOX)
    everyone = run_ranks(evaluations, ranks, _values(values, layout, 2), [5, 8, 16])
    assert all(results == everyone[0] for results in everyone), "every rank knows the result"
    for actual, expected in zip(everyone[0], one_process[model], strict=True):
        assert actual.lm_loss == pytest.approx(expected.lm_loss, rel=1e-6)
        assert actual.unigram_entropy == pytest.approx(expected.unigram_entropy, rel=1e-12)


def direct(rank: int, world_size: int, values: dict[str, Any]) -> tuple[float, np.ndarray]:
    """Mean loss of five samples, one at a time through the bare model, and their labels."""
    from megatron.data.batch import collate_samples

    training = begin(values)
    assert training.datasets.valid is not None
    losses, labels = [], []
    for i in range(5):
        batch = collate_samples([training.datasets.valid[i]], eod=training.tokenizer.eod, eod_mask_loss=True)
        counts = batch.loss_weights[0] > 0
        logits = training.engine.stage(None, batch)[:, 0].double()  # type: ignore[index]
        losses.append(torch.nn.functional.cross_entropy(logits[counts], batch.labels[0][counts], reduction="sum"))
        labels.append(batch.labels[0][counts].numpy())
    return float(torch.stack(losses).sum()) / sum(map(len, labels)), np.concatenate(labels)


def test_against_the_bare_model(one_process: dict[str, list[ValidationResult]]) -> None:
    loss, labels = run_ranks(direct, 1, _values(NEOX, {}, 8))[0]
    assert one_process["neox"][0].lm_loss == pytest.approx(loss, rel=1e-6)
    assert one_process["neox"][0].unigram_entropy == pytest.approx(unigram_entropy(labels), rel=1e-12)


def character_perplexities(rank: int, world_size: int, values: dict[str, Any]) -> list[tuple[float, float | None]]:
    """For the pool: loss and tokens per character of all validation samples."""
    training = begin(values)
    assert training.datasets.valid is not None
    tokenizer, valid = training.tokenizer, training.datasets.valid
    result = evaluate(training.engine, valid, 8, tokenizer.eod, tokenizer.detokenize)
    return [(result.lm_loss, result.tokens_per_character), (result.character_perplexity or 0.0, None)]


def test_characters_are_those_of_the_text() -> None:
    """Of the labels that the loss is over, in every layout; a document's end has no characters."""
    import tokenizers

    values = _values(NEOX, {}, 8)
    (loss, per_character), (perplexity, _) = run_ranks(character_perplexities, 1, values)[0]
    assert perplexity == pytest.approx(np.exp(loss * per_character))
    library = tokenizers.Tokenizer.from_file(values["vocab_file"])
    tokens = characters = 0
    for batch in run_ranks(first_batches, 1, values)[0]:
        for labels, weights in zip(batch.labels, batch.loss_weights, strict=True):
            kept = labels[weights > 0].tolist()
            tokens, characters = tokens + len(kept), characters + len(library.decode(kept, skip_special_tokens=True))
    assert per_character == pytest.approx(tokens / characters, rel=1e-12)
    assert 0.05 < per_character < 1.0
    for ranks, layout in ((2, {"pipe_parallel_size": 2}), (2, {})):
        everyone = run_ranks(character_perplexities, ranks, _values(NEOX, layout, 2))
        assert [results[0][1] for results in everyone] == [per_character] * ranks


def first_batches(rank: int, world_size: int, values: dict[str, Any]) -> list[Any]:
    """For the pool: eight validation samples."""
    from megatron.data.batch import collate_samples

    training = begin(values)
    valid, eod = training.datasets.valid, training.tokenizer.eod
    assert valid is not None
    return [collate_samples([valid[i]], eod=eod, eod_mask_loss=True) for i in range(8)]
