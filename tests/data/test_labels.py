"""Labels and rewards beside the tokens: from config keys to batches, and what is said of unlisted ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import DataError, IndexedDataset, data_fingerprint, data_log_lines, epoch_iterations, order_keys
from megatron.data.batch import collate_samples
from megatron.data.blending import BlendedDataset, RepeatedDataset
from megatron.data.labels import open_labels, open_rewards
from megatron.data.packed_dataset import PackedDataset
from tests.data.samples import DATASET, INDEXMAPS, refused, write_dataset, write_rows
from tests.data.test_text_sets import build, make_args

CHAT, INSTRUCT, KTO = (str(DATASET / name) for name in ("chat_conversation", "instruct", "chat_kto_conversation"))
CHAT_TEXT, CHAT_LABEL = f"{CHAT}_document", f"{CHAT}_label_document"
INSTRUCT_TEXT, INSTRUCT_LABEL = f"{INSTRUCT}_text_document", f"{INSTRUCT}_label_document"
LABELLED_CORPORA = ((CHAT_TEXT, CHAT_LABEL), (INSTRUCT_TEXT, INSTRUCT_LABEL))


def labelled_args(tmp_path: Path, *sets: tuple[str, str], **changes: Any):
    values = {"data_path": None, "eval_iters": 0, "index_cache_dir": str(tmp_path / "cache"), "train_iters": 5,
              "train_data_paths": tuple(text for text, _ in sets),
              "train_label_data_paths": tuple(label for _, label in sets)}  # fmt: skip
    return make_args(**values | changes)


def train(args, **options: int) -> Any:
    return build(args, **options).train


def test_packed_labels_are_those_of_neox(tmp_path: Path):
    recorded = np.load(INDEXMAPS / "packed_labels_instruct" / "samples.npz")
    # ceil(59 * 1.005) = 60 samples are wanted, as there
    samples = train(labelled_args(tmp_path, LABELLED_CORPORA[1], train_iters=59), batch=1)
    assert isinstance(samples, PackedDataset)
    for place, index in enumerate(recorded["_index"].tolist()):
        np.testing.assert_array_equal(samples[index].tokens, recorded["text"][place])
        np.testing.assert_array_equal(samples[index].labels, recorded["label"][place])
    batch = collate_samples([samples[i] for i in range(4)])
    label = recorded["label"][:4, 1:]
    assert np.array_equal(batch.loss_weights.numpy(), (label >= 0).astype(np.int64))
    assert np.array_equal(batch.labels.numpy(), np.where(label >= 0, label, 0))
    assert 0 < batch.loss_weights.sum() < batch.loss_weights.numel()


@pytest.mark.parametrize("pack_impl", ["packed", "pack_until_overflow", "unpacked", "best_fit"])
def test_blends_of_labelled_sets(pack_impl: str, tmp_path: Path):
    keys = {"pack_impl": pack_impl, "train_data_weights": (3.0, 1.0), "seq_length": 128}
    args = labelled_args(tmp_path, *LABELLED_CORPORA, **keys)
    samples = train(args)
    assert isinstance(samples, BlendedDataset) and samples.maps.drawn.tolist() == [30, 10]
    for sample in (samples[i] for i in range(40)):
        trained = sample.labels >= 0
        assert (sample.labels[trained] == sample.tokens[trained]).all()
        assert 0 < trained.sum() < 129
    if pack_impl == "unpacked":
        packed = samples.members[0]
        document = packed.maps.doc_idx[packed.maps.shuffle_idx[0]]
        row = packed.labels[document][:129]
        assert packed[0].labels[: len(row)].tolist() == row.tolist()


def test_epochs_of_labelled_documents(tmp_path: Path):
    """24 documents each; all have labels: 48 samples a pass."""
    args = labelled_args(
        tmp_path, *LABELLED_CORPORA, pack_impl="unpacked", train_epochs=2, train_iters=None, seq_length=512
    )
    args.train_iters = epoch_iterations(args, 8)
    samples = train(args, epochs=2)
    assert isinstance(samples, RepeatedDataset) and len(samples) == 96 and args.train_iters == 12
    firsts = {tuple(samples[i].tokens) for i in range(48)}
    assert len(firsts) == 48 and {tuple(samples[i].tokens) for i in range(48, 96)} == firsts


@pytest.mark.parametrize("keys", [{"pack_impl": "best_fit"}, {"pack_impl": "unpacked"}, {"drop_last": False}])
def test_a_small_set_is_validated_with_once(keys: dict, tmp_path: Path):
    rows = [[10 + n] * (3 + n) for n in range(5)]
    paths = {"data_path": None, "train_data_paths": (CHAT_TEXT,),
             "valid_data_paths": (write_rows(tmp_path / "valid", rows),)}  # fmt: skip
    dataset = build(make_args(**paths, eval_iters=50, index_cache_dir=str(tmp_path), **keys)).valid
    all_tokens = np.concatenate([dataset[i].tokens for i in range(len(dataset))])
    assert [int((all_tokens == row[0]).sum()) for row in rows] == [len(row) for row in rows]


def test_changed_labels_change_the_maps(tmp_path: Path):
    """Lengths stay, but another document has nothing to learn: the cache must not hand out the old rows."""
    text = write_rows(tmp_path / "x_document", [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    token_sets = []
    for masked in (0, 2):
        rows = [[-100, 2, 3], [-100, 5, 6], [-100, 8, 9]]
        rows[masked] = [-100] * 3
        label = write_rows(tmp_path / "x_label_document", rows)
        args = labelled_args(tmp_path, (text, label), pack_impl="best_fit", seq_length=8)
        samples = train(args)
        token_sets.append({int(token) for i in range(len(samples)) for token in samples[i].tokens})
        assert set(data_fingerprint(args)["train"]) > {"labels"}
    assert token_sets == [{0, 4, 5, 6, 7, 8, 9}, {0, 1, 2, 3, 4, 5, 6}]


def test_rewards_come_with_their_documents(tmp_path: Path):
    rewards = IndexedDataset(f"{KTO}_reward_document")
    labelled_set, changes = (f"{KTO}_document", f"{KTO}_label_document"), {"pack_impl": "unpacked", "seq_length": 128}
    args = labelled_args(tmp_path, labelled_set, **changes, train_reward_data_paths=(f"{KTO}_reward_document",))
    samples = train(args)
    documents = [int(samples.maps.doc_idx[row]) for row in samples.maps.shuffle_idx[:8]]
    row_rewards = [samples[i].reward for i in range(8)]
    assert row_rewards == [float(rewards[d][0]) for d in documents] and len(set(row_rewards)) == 2
    assert set(data_fingerprint(args)["train"]) > {"labels", "rewards"}


def test_rewards_keep_their_fractions(tmp_path: Path):
    text = write_dataset(tmp_path / "x", [5, 6, 7])
    path = write_rows(tmp_path / "r", [[0.25], [-1.75], [3.5e-3]], np.float32)
    assert [row[0] for row in open_rewards(path, text)] == [np.float32(v) for v in (0.25, -1.75, 3.5e-3)]


@pytest.mark.parametrize(("rows", "message"), [
    ([[-100, 2, 3], [5, 6]], r"label\.bin: document 1 .*2 labels.*text\.bin .*3 tokens"),
    ([[1, 2, 3]], r"label\.bin: .*1 documents.*text\.bin .*2: document 1 "),
])  # fmt: skip
def test_labels_of_other_documents_are_refused(rows: list[list[int]], message: str, tmp_path: Path):
    text = write_rows(tmp_path / "text", [[1, 2, 3], [4, 5, 6]])
    args = labelled_args(tmp_path, (text, write_rows(tmp_path / "label", rows)), seq_length=2)
    refused(message, build, args)


def test_what_can_be_no_label_or_reward_is_refused(tmp_path: Path):
    text = write_dataset(tmp_path / "text", [3, 3])
    refused(r"text\.bin: .*uint16.*int32", open_labels, str(tmp_path / "text"), text)
    for bad in (float("nan"), float("inf")):
        path = write_rows(tmp_path / "r", [[1.0], [bad]], np.float32)
        refused(r"r\.bin: document 1 .*finite reward", open_rewards, path, text)
    floats = write_rows(tmp_path / "f", [[1.0] * 40], np.float32)
    with pytest.raises(DataError, match=r"f\.bin.*float32.*tokens"):
        build(labelled_args(tmp_path, (floats, floats), train_label_data_paths=None, seq_length=8))


def test_labels_outside_the_vocabulary_end_training(tmp_path: Path):
    text = write_rows(tmp_path / "text", [[1, 2, 3, 4]])
    label = write_rows(tmp_path / "label", [[-100, 2, 70, 4]])
    samples = train(labelled_args(tmp_path, (text, label), seq_length=3, padded_vocab_size=64))
    with pytest.raises(DataError, match=r"label\.bin: document 0 .*70 .*token 2"):
        samples[0]


def test_a_token_outside_the_vocabulary_whose_label_is_masked_ends_training(tmp_path: Path):
    text, label = write_rows(tmp_path / "text", [[1, 64, 3, 4]]), write_rows(tmp_path / "label", [[-100, -100, 3, 4]])
    samples = train(labelled_args(tmp_path, (text, label), seq_length=3, padded_vocab_size=64))
    with pytest.raises(DataError, match=r"text\.bin: document 0 .*64 .*token 1"):
        samples[0]


def test_no_sample_at_all_is_refused(tmp_path: Path):
    text, label = write_rows(tmp_path / "text", [[1, 2, 3]] * 3), write_rows(tmp_path / "label", [[-100] * 3] * 3)
    for changes in (
        {"pack_impl": "best_fit"},
        {"pack_impl": "unpacked", "train_label_data_paths": None, "allow_chopped": False, "seq_length": 1},
        {"drop_last": True, "seq_length": 10},
    ):
        with pytest.raises(DataError, match=r"text\.bin \(train_data_paths\): no sample .*3 documents"):
            build(labelled_args(tmp_path, (text, label), **{"seq_length": 2, **changes}))


def test_labels_that_are_not_listed_are_named(tmp_path: Path):
    """24 chats and 24 instructions: the numbers are those of the golden label files."""
    masked = int((IndexedDataset(CHAT_LABEL).tokens < 0).sum())
    chat, instruct = data_log_lines(labelled_args(tmp_path, *LABELLED_CORPORA, train_label_data_paths=None))
    facts = (f"{masked} of 4099", f"{masked / 40.99:.1f} %", f"list {CHAT_LABEL} in train_label_data_paths")
    assert chat.startswith(f"{CHAT_TEXT}: ") and all(fact in chat for fact in facts)
    assert instruct.endswith(f"list {INSTRUCT_LABEL} in train_label_data_paths")
    (note,) = data_log_lines(make_args(data_path=CHAT_TEXT))
    assert f"list {CHAT_LABEL} in train_label_data_paths" in note and "train_data_paths" in note
    assert data_log_lines(labelled_args(tmp_path, LABELLED_CORPORA[0])) == []
    unlabelled = write_dataset(tmp_path / "x_text_document", [3, 9])
    assert data_log_lines(make_args(data_path=unlabelled.prefix)) == []


def test_truncated_documents_are_counted(tmp_path: Path):
    prefix = write_dataset(tmp_path / "x", [3, 9, 20, 5]).prefix
    for changes, facts in (
        ({"pack_impl": "best_fit", "seq_length": 7}, ("2 of 4", "8 tokens", "13 tokens")),
        ({"pack_impl": "best_fit", "seq_length": 7, "allow_chopped": False}, ("2 of 4", "8 tokens", "allow_chopped")),
        ({"truncate_documents": 4}, ("3 of 4", "4 tokens", "22 tokens")),
    ):
        (note,) = data_log_lines(make_args(data_path=prefix, **changes))
        assert note.startswith(f"{prefix}: ") and all(fact in note for fact in facts)
    assert data_log_lines(make_args(data_path=prefix)) == []


def test_documents_are_those_of_the_data_and_of_eod_without_labels(tmp_path: Path):
    """0 ends documents; within a labelled one it may also stand between turns."""
    text = write_rows(tmp_path / "text", [[1, 0, 2, 0], [3, 4, 0]])
    label = write_rows(tmp_path / "label", [[-100, 0, 2, 0], [-100, 4, 0]])
    resets = {"eod": 0, "reset_attention_mask": True, "reset_position_ids": True}
    args = {"pack_impl": "best_fit", "seq_length": 8}
    labelled, unlabelled = (
        collate_samples([train(labelled_args(tmp_path, (text, label), **changes, **args))[0]], **resets)
        for changes in ({}, {"train_label_data_paths": None})
    )
    assert labelled.tokens.tolist() == unlabelled.tokens.tolist() == [[1, 0, 2, 0, 3, 4, 0, 0]]
    # The last document is the padding
    assert labelled.documents.cu_seqlens.tolist() == [0, 4, 7, 8]
    assert unlabelled.documents.cu_seqlens.tolist() == [0, 2, 4, 7, 8, 8, 8, 8]
    assert labelled.loss_weights.tolist() == [[1, 1, 1, 0, 1, 1, 0, 0]]
    assert unlabelled.loss_weights.tolist() == [[1, 0, 1, 0, 1, 1, 0, 0]]
    assert labelled.positions is not None and labelled.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]


def test_the_order_says_how_documents_were_packed(tmp_path: Path):
    """A run goes on only with rows made in the same way; more iterations only continue them."""

    def order(pack_impl: str, **changes) -> dict:
        return order_keys(labelled_args(tmp_path, *LABELLED_CORPORA, pack_impl=pack_impl, **changes))

    assert order("best_fit") == order("best_fit", train_iters=50)
    assert order("best_fit") not in (order("unpacked"), order("best_fit", allow_chopped=False))
