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

from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDataset
from tests.data.samples import DATASET, json_rows, pair, rows_of
from tools.datasets import preprocess_data_with_chat_template, preprocess_data_with_mask

BLANK, EOS = 222, 0


@pytest.fixture
def chat(tmp_path):
    def run(source, *flags, workers=1, prefix="out"):
        words = f"--input {DATASET / source} --output-prefix {tmp_path / prefix} --workers {workers}".split()
        preprocess_data_with_chat_template.main([*words, "--tokenizer-path", f"{DATASET}/hf_tokenizer", *flags])
        return tmp_path / prefix

    return run


def arrays(prefix):
    return [np.array(row) for row in rows_of(prefix)]


def _as_neox_cuts(ids, labels):
    """Row one of the table: the token over the prompt's blank and the answer is the blank, and masked."""
    ids, labels = ids.copy(), labels.copy()
    answer_starts = np.flatnonzero((labels >= 0) & (np.roll(labels, 1) < 0))
    answer_starts = answer_starts[ids[answer_starts] != EOS]
    ids[answer_starts], labels[answer_starts] = BLANK, -100
    return ids, labels


def equal_but_for_the_blanks(out, golden, key):
    """Whether all documents under a key are, which also says that some differ in these."""
    names = (f"{key}_document", f"{key}_label_document")
    (ids, labels), (neox_ids, neox_labels) = (
        [arrays(f"{prefix}_{name}") for name in names] for prefix in (out, golden)
    )
    merged_rows = [_as_neox_cuts(*row) for row in zip(ids, labels, strict=True)]
    neox_rows = zip(neox_ids, neox_labels, strict=True)
    are_equal = all(
        np.array_equal(a, c) and np.array_equal(b, d) for (a, b), (c, d) in zip(merged_rows, neox_rows, strict=True)
    )
    return are_equal and not any(map(np.array_equal, ids, neox_ids))


@pytest.mark.parametrize("workers", [1, 2])
def test_conversations(chat, workers):
    out = chat("chat.jsonl", workers=workers)
    assert equal_but_for_the_blanks(out, DATASET / "chat", "conversation")
    assert pair(f"{out}_conversation_document")[1] == pair(DATASET / "chat_conversation_document")[1]


def test_only_the_last_message(chat, capsys):
    with pytest.raises(SystemExit, match=r"chat\.jsonl:11: .*--untrained"):
        chat("chat.jsonl", "--only-last", "--on-bad-row", "stop")
    out = chat("chat.jsonl", "--only-last", "--untrained", "keep")
    written = (arrays(f"{out}_conversation_{kind}document") for kind in ("", "label_"))
    golden = arrays(DATASET / "chat_onlylast_conversation_label_document")
    assert all(np.array_equal(_as_neox_cuts(*row)[1], labels) for *row, labels in zip(*written, golden, strict=True))
    assert "rows without a trained token: 1" in capsys.readouterr().out  # row 11 ends in a user's message


def test_pairs(chat):
    out = chat("pairs.jsonl", "--jsonl-keys", "chosen", "rejected")
    assert all(equal_but_for_the_blanks(out, DATASET / "pairs", key) for key in ("chosen", "rejected"))


def test_reward_model_pairs(chat):
    out = chat("pairs.jsonl", "--jsonl-keys", "chosen", "rejected", "--for-rm")
    for name in ("chosen_document", "chosen_label_document", "rejected_document", "rejected_label_document"):
        for ids, neox_ids in zip(arrays(f"{out}_{name}"), arrays(DATASET / f"pairs_rm_{name}"), strict=True):
            assert np.array_equal(ids, np.delete(neox_ids, -2)) and neox_ids[-1] == EOS


def test_rewards(chat):
    source = json_rows(DATASET / "chat.jsonl")
    out = chat("chat.jsonl", "--reward-key", "score", "--binary-reward")
    rewards, golden = IndexedDataset(f"{out}_conversation_reward_document"), "chat_kto_conversation_reward_document"
    assert rewards.dtype == np.float32 and np.array_equal(rewards.tokens, IndexedDataset(DATASET / golden).tokens)
    rewards = IndexedDataset(f"{chat('chat.jsonl', '--reward-key', 'scoref')}_conversation_reward_document")
    golden = IndexedDataset(DATASET / "chat_rewardfloat_conversation_reward_document")
    assert np.array_equal(rewards.tokens, np.array([row["scoref"] for row in source], np.float32))
    assert np.array_equal(rewards.tokens.astype(np.int32), golden.tokens) and np.array_equal(
        rewards.sizes, golden.sizes
    )


def test_without_a_mask(chat):
    masked = rows_of(f"{chat('chat.jsonl')}_conversation_document")
    out = chat("chat.jsonl", "--no-mask", prefix="bare")
    assert masked == rows_of(f"{out}_conversation_document")
    assert not Path(f"{out}_conversation_label_document.bin").exists()


@pytest.fixture
def mask(tmp_path):
    def run(*flags):
        words = f"--input {DATASET}/instruct.jsonl --output-prefix {tmp_path}/out --tokenizer-type HFTokenizer".split()
        preprocess_data_with_mask.main([*words, "--append-eod", "--vocab-file", f"{DATASET}/tokenizer.json", *flags])
        return tmp_path / "out"

    return run


def test_mask_before_token(mask, capsys):
    out = mask("--mask-before-token", "222,34,79,84,88,264,27")
    for kind in ("text", "label"):
        assert pair(f"{out}_{kind}_document") == pair(DATASET / f"instruct_{kind}_document")
    assert "documents without the delimiter: 1\n" in capsys.readouterr().out  # row 6: trained whole, as in NeoX


@pytest.mark.parametrize("flags, message", [
    ([], "--mask-before-token is missing"),
    (["--mask-before-token", "1,x"], "write token ids"),
    (["--mask-before-token", "380"], "token ids must be from 0 to 379"),
    (["--mask-before-token", "1", "--jsonl-keys", "a", "b"], "one key"),
])  # fmt: skip
def test_mask_flags_that_cannot_be(mask, flags, message):
    with pytest.raises(SystemExit, match=rf"^preprocess_data_with_mask.py: error: .*{message}[^\n]*$"):
        mask(*flags)
