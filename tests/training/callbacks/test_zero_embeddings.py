"""Tokens whose embeddings are zero are named before the first step of a run that starts from a model."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron.tokenizer import HFTokenizer
from tests.pool import run_ranks
from tests.training.runs import TABLE, cells, output_of_run
from tests.training.test_huggingface import TOKENIZER, VOCABULARY, folder, run_values

EMBEDDINGS = "gpt_neox.embed_in.weight"
WARNING = re.compile(r"zero embeddings for tokens of the first step: (.*); the model")


def zeroed(path: Path, tokens: list[int]) -> Path:
    """A HuggingFace model with zero embeddings for these tokens."""
    file = folder(path) / "model.safetensors"
    weights = load_file(file)
    weights[EMBEDDINGS][tokens] = 0.0
    save_file(weights, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("layout", cells(["tp2 pp2 sp"], ["zero3", "plain"]))
def test_tokens_of_the_first_step_are_named(layout: str, tmp_path: Path) -> None:
    """One in each half of the vocabulary, which two tensor ranks hold; padding and unused rows are not."""
    ranks, keys = TABLE[layout]
    tokenizer = HFTokenizer(TOKENIZER)
    assert tokenizer.pad is not None
    frequent = [*tokenizer.tokenize("e"), *tokenizer.tokenize(" the")]
    assert frequent[0] < VOCABULARY // 2 < frequent[1]
    model = zeroed(tmp_path / "model", [*frequent, tokenizer.pad, VOCABULARY + 1])
    output = run_ranks(output_of_run, ranks, run_values(tmp_path / "run", model, **keys), True)[0]
    (names,) = WARNING.findall(output)
    for token in frequent:
        assert f"{tokenizer.detokenize([token])!r} ({token})" in names
    assert f"({tokenizer.pad})" not in names and f"({VOCABULARY + 1})" not in names


def test_a_resumed_run_and_fresh_weights_are_silent(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(TOKENIZER)
    model = zeroed(tmp_path / "model", tokenizer.tokenize("e"))
    values = run_values(
        tmp_path / "run", model, train_iters=1, lr_decay_iters=2, extra_save_iters=[], checkpoint_factor=1
    )
    assert WARNING.search(run_ranks(output_of_run, 1, values, True)[0])
    assert not WARNING.search(run_ranks(output_of_run, 1, {**values, "train_iters": 2}, True)[0])
    fresh = {**values, "load": None, "save": str(tmp_path / "fresh")}
    assert not WARNING.search(run_ranks(output_of_run, 1, fresh, True)[0])
