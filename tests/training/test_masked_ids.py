"""Tokens that are never trained (`loss_mask_token_ids`): as if their labels had been masked by hand."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import IndexedDataset, IndexedDatasetWriter
from megatron.launch import process_info
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.tokenizer import build_tokenizer, with_masked_ids
from megatron.training import start, train
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, LLAMA, SGD, bit_equal, config, curves

CHAT = str(GOLDEN / "dataset" / "chat_conversation")
CORPUS = str(GOLDEN / "dataset" / "corpusA_text_document")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "tp2": (2, {"model_parallel_size": 2}),
    "pp2": (2, {"pipe_parallel_size": 2}),
}
PLAIN = {"data_path": None, "split": None, "train_data_paths": [CORPUS], "eod_mask_loss": False}
PACKED = {
    "pack_impl": "best_fit", "seq_length": 128, "max_position_embeddings": 128, "reset_attention_mask": True,
    "reset_position_ids": True,
}  # fmt: skip


def frequent(prefix: str, count: int = 3) -> list[int]:
    """The tokens that a set has most of."""
    return [int(token) for token in np.argsort(np.bincount(IndexedDataset(prefix).tokens))[::-1][:count]]


def masked_by_hand(text: str, labels: str, ids: list[int], target: Path) -> str:
    """A file of labels in which `ids` are -100."""
    with IndexedDatasetWriter(target, np.int32) as writer:
        source, tokens = IndexedDataset(labels), IndexedDataset(text)
        for document in range(len(source)):
            row = source[document].astype(np.int32)
            assert len(row) == len(tokens[document])
            writer.add_document(np.where(np.isin(row, ids), -100, row))
    return str(target)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_labels_masked_by_hand(layout: str, tmp_path: Path) -> None:
    """In pre-training and in SFT of packed chats; with SGD the weights after two steps are the gradients."""
    ranks, keys = LAYOUTS[layout]
    text, labels = f"{CHAT}_document", f"{CHAT}_label_document"
    chat = config(LLAMA, SGD, PLAIN, PACKED, keys, train_data_paths=[text], train_micro_batch_size_per_gpu=2)
    plain = config(LLAMA, SGD, PLAIN, keys)
    of_chat, of_text = frequent(text), frequent(CORPUS)
    runs = [
        {**chat, "train_label_data_paths": [masked_by_hand(text, labels, of_chat, tmp_path / "chat")]},
        {**chat, "train_label_data_paths": [labels], "loss_mask_token_ids": of_chat},
        {**chat, "train_label_data_paths": [labels]},
        {**plain, "train_label_data_paths": [masked_by_hand(CORPUS, CORPUS, of_text, tmp_path / "text")]},
        {**plain, "loss_mask_token_ids": of_text},
    ]
    for by_hand, by_id, unmasked, text_by_hand, text_by_id in run_ranks(curves, ranks, runs, 2):
        for ours, theirs in ((by_id, by_hand), (text_by_id, text_by_hand)):
            assert ours.losses == theirs.losses and ours.norms == theirs.norms
            assert bit_equal(ours.weights, theirs.weights)
        assert by_id.losses != pytest.approx(unmasked.losses, rel=1e-4)


def said(rank: int, world_size: int, values: dict[str, Any], steps: bool = False) -> str:
    """For the pool: what a run says before its first step, or (steps) to its end."""
    with redirect_stdout(io.StringIO()) as output:
        training = start(NeoXArgs.from_dict(values), process_info())
        if steps:
            train(training)
        training.engine.close()
    return output.getvalue()


def test_what_is_masked_is_counted_at_start(tmp_path: Path) -> None:
    tokens = IndexedDataset(CORPUS).tokens
    (token,) = frequent(CORPUS, 1)
    unused = next(i for i in range(1, 380) if not (tokens == i).any())
    values = config(LLAMA, PLAIN, loss_mask_token_ids=[unused, token, "<|endoftext|>"])
    output = run_ranks(said, 1, values)[0]
    end = int(next(row[-1] for row in map(IndexedDataset(CORPUS).get, range(3))))
    counts = {i: int((tokens == i).sum()) for i in sorted({token, end})}
    listed = ", ".join(f"{i}: {count}" for i, count in counts.items())
    assert f"masks {sum(counts.values())} of {len(tokens)} trained tokens of the training data, " in output
    assert f"(token id: times {listed}); never there: token id {unused}" in output


def test_a_set_of_which_all_is_masked_trains_nothing(tmp_path: Path) -> None:
    """Rows and steps without a token to train go by, in validation too."""
    ids = np.unique(IndexedDataset(CORPUS).tokens).tolist()
    values = config(LLAMA, PLAIN, loss_mask_token_ids=ids, train_iters=2, valid_data_paths=[CORPUS], eval_iters=1)
    output = run_ranks(said, 1, {**values, "save": str(tmp_path), "checkpoint_factor": 9}, True)[0]
    assert "none of its tokens is trained" in output and "run finished at iteration 2" in output


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["several words"], r'loss_mask_token_ids: "several words" is \d+ tokens \[\d+, .*\], not one'),
        ([100000], r"loss_mask_token_ids: 100000 is no token: the vocabulary has \d+, so ids end at \d+"),
        ([-1], "expected a number at least 0"),
        ([""], r'"" is 0 tokens'),
    ],
)
def test_what_is_no_token_is_refused(tokens: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        args = NeoXArgs.from_dict(config(LLAMA, PLAIN, loss_mask_token_ids=tokens))
        with_masked_ids(args, build_tokenizer(args))
