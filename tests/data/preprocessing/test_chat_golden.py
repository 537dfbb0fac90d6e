r"""The chat and mask tools against files that GPT-NeoX 2.0's wrote (tests/data/golden/dataset).

| GPT-NeoX | here |
|---|---|
| an answer's first token that merges with the blank before it (` The`) becomes that blank, masked: the word is lost | \
  tokenised whole and trained, as TRL 1.16 does; `_as_neox_cuts` does NeoX's to ours, and the rest is equal |
| --for-rm ends a document in two end-of-text tokens, the template's text having none | one |
| a float reward is cut to an integer, and rewards are int32 | float32 |
| --no-mask dies of KeyError 'conversation_label' | the tokens without a label file |
| no --mask-before-token dies of KeyError 'label' | refused, naming the flag |
| an end-of-text token behind every template, also behind its own stop token | only where the template has none (TRL) |
"""  # noqa: W505 (lines to copy)

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDataset
from tools.datasets import preprocess_data_with_chat_template, preprocess_data_with_mask

GOLDEN = Path(__file__).parents[1] / "golden" / "dataset"
BLANK = 222
EOS = 0


@pytest.fixture
def chat(tmp_path):
    def run(source, *flags, workers=1, prefix="out"):
        preprocess_data_with_chat_template.main(
            [
                *("--input", str(GOLDEN / source), "--output-prefix", str(tmp_path / prefix)),
                *("--tokenizer-path", str(GOLDEN / "hf_tokenizer"), "--workers", str(workers), *flags),
            ]
        )
        return tmp_path / prefix

    return run


def rows(prefix):
    dataset = IndexedDataset(prefix)
    return [dataset[i] for i in range(len(dataset))]


def same_bytes(ours, golden):
    for suffix in (".bin", ".idx"):
        assert Path(f"{ours}{suffix}").read_bytes() == (GOLDEN / f"{golden}{suffix}").read_bytes(), suffix


def _as_neox_cuts(ids, labels):
    """Row one of the table: the token that spans the prompt's blank and the answer is only the blank, and
    masked."""
    ids, labels = ids.copy(), labels.copy()
    first = np.flatnonzero((labels >= 0) & (np.roll(labels, 1) < 0))
    first = first[ids[first] != EOS]
    ids[first], labels[first] = BLANK, -100
    return ids, labels


@pytest.mark.parametrize("workers", [1, 2])
def test_conversations(chat, workers):
    out = chat("chat.jsonl", workers=workers)
    ours = zip(rows(f"{out}_conversation_document"), rows(f"{out}_conversation_label_document"), strict=True)
    golden = zip(
        rows(GOLDEN / "chat_conversation_document"), rows(GOLDEN / "chat_conversation_label_document"), strict=True
    )
    for (ids, labels), (their_ids, their_labels) in zip(ours, golden, strict=True):
        cut, cut_labels = _as_neox_cuts(ids, labels)
        assert np.array_equal(cut, their_ids) and np.array_equal(cut_labels, their_labels)
        assert not np.array_equal(ids, their_ids)
    same_idx = Path(f"{out}_conversation_document.idx").read_bytes()
    assert same_idx == (GOLDEN / "chat_conversation_document.idx").read_bytes()


def test_only_the_last_message(chat, capsys):
    with pytest.raises(SystemExit, match=r"chat\.jsonl:11: none of its tokens is trained; see --untrained"):
        chat("chat.jsonl", "--only-last")
    out = chat("chat.jsonl", "--only-last", "--untrained", "keep")
    texts, labels = rows(f"{out}_conversation_document"), rows(f"{out}_conversation_label_document")
    golden = rows(GOLDEN / "chat_onlylast_conversation_label_document")
    for ids, row, golden_labels in zip(texts, labels, golden, strict=True):
        assert np.array_equal(_as_neox_cuts(ids, row)[1], golden_labels)
    assert "rows without a trained token: 1" in capsys.readouterr().out  # row 11 ends in a user's message


@pytest.mark.parametrize("key", ["chosen", "rejected"])
def test_pairs(chat, key):
    out = chat("pairs.jsonl", "--jsonl-keys", "chosen", "rejected")
    ours = zip(rows(f"{out}_{key}_document"), rows(f"{out}_{key}_label_document"), strict=True)
    golden = zip(rows(GOLDEN / f"pairs_{key}_document"), rows(GOLDEN / f"pairs_{key}_label_document"), strict=True)
    for (ids, labels), (their_ids, their_labels) in zip(ours, golden, strict=True):
        cut, cut_labels = _as_neox_cuts(ids, labels)
        assert np.array_equal(cut, their_ids) and np.array_equal(cut_labels, their_labels)


@pytest.mark.parametrize("key", ["chosen", "rejected"])
def test_reward_model_pairs(chat, key):
    out = chat("pairs.jsonl", "--jsonl-keys", "chosen", "rejected", "--for-rm")
    for ours, golden in (
        (f"{out}_{key}_document", GOLDEN / f"pairs_rm_{key}_document"),
        (f"{out}_{key}_label_document", GOLDEN / f"pairs_rm_{key}_label_document"),
    ):
        for ids, theirs in zip(rows(ours), rows(golden), strict=True):
            assert np.array_equal(ids, np.delete(theirs, -2)) and theirs[-1] == EOS


def test_rewards(chat):
    source = [json.loads(line) for line in (GOLDEN / "chat.jsonl").read_text().splitlines()]
    out = chat("chat.jsonl", "--reward-key", "score", "--binary-reward")
    ours, golden = IndexedDataset(f"{out}_conversation_reward_document"), "chat_kto_conversation_reward_document"
    assert ours.dtype == np.float32 and np.array_equal(ours.tokens, IndexedDataset(GOLDEN / golden).tokens)
    out = chat("chat.jsonl", "--reward-key", "scoref")
    ours, golden = (
        IndexedDataset(f"{out}_conversation_reward_document"),
        "chat_rewardfloat_conversation_reward_document",
    )
    assert np.array_equal(ours.tokens, np.array([row["scoref"] for row in source], np.float32))
    assert np.array_equal(ours.tokens.astype(np.int32), IndexedDataset(GOLDEN / golden).tokens)
    assert np.array_equal(ours.sizes, IndexedDataset(GOLDEN / golden).sizes)


def test_without_a_mask(chat):
    masked = rows(f"{chat('chat.jsonl')}_conversation_document")
    out = chat("chat.jsonl", "--no-mask", prefix="bare")
    assert all(map(np.array_equal, masked, rows(f"{out}_conversation_document")))
    assert not Path(f"{out}_conversation_label_document.bin").exists()


@pytest.fixture
def mask(tmp_path):
    def run(*flags):
        preprocess_data_with_mask.main(
            [
                *("--input", str(GOLDEN / "instruct.jsonl"), "--output-prefix", str(tmp_path / "out")),
                *("--tokenizer-type", "HFTokenizer", "--vocab-file", str(GOLDEN / "tokenizer.json"), "--append-eod"),
                *flags,
            ]
        )
        return tmp_path / "out"

    return run


def test_mask_before_token(mask, capsys):
    out = mask("--mask-before-token", "222,34,79,84,88,264,27")
    same_bytes(f"{out}_text_document", "instruct_text_document")
    same_bytes(f"{out}_label_document", "instruct_label_document")
    assert "documents without the delimiter: 1\n" in capsys.readouterr().out  # row 6: trained whole, as in NeoX


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "needs --mask-before-token"),
        (["--mask-before-token", "1,x"], "write token ids"),
        (["--mask-before-token", "380"], "the vocabulary ends at 379"),
        (["--mask-before-token", "1", "--jsonl-keys", "a", "b"], "one key"),
    ],
)
def test_mask_flags_that_cannot_be(mask, flags, message):
    with pytest.raises(SystemExit, match=rf"^preprocess_data_with_mask.py: error: .*{message}[^\n]*$"):
        mask(*flags)
