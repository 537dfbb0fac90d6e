"""Preference pairs against GPT-NeoX's samples and TRL's implicit prompt."""

from pathlib import Path

import numpy as np
import pytest
from trl.data_utils import extract_prompt

from megatron.data import DataError, IndexedDataset
from megatron.data.index_maps import DataState
from megatron.data.preferences.preference_sets import build_preference_sets
from tests.data.samples import DATASET, INDEXMAPS, golden_maps, plain_args, refused, rows_of, write_rows

PAIRS = {name: str(DATASET / f"pairs_{name}_document") for name in ("chosen", "rejected")}
LABELS = {name: str(DATASET / f"pairs_{name}_label_document") for name in ("chosen", "rejected")}
GOLDEN = np.load(INDEXMAPS / "pairwise_unpacked" / "samples.npz")


ARGS = {"pos_train_data_paths": (PAIRS["chosen"],), "neg_train_data_paths": (PAIRS["rejected"],),
        "pos_train_label_data_paths": (LABELS["chosen"],), "neg_train_label_data_paths": (LABELS["rejected"],),
        "data_impl": "infer", "seq_length": 128, "pack_impl": "unpacked", "padded_vocab_size": 380,
        "train_impl": "dpo", "dataset_impl": "pairwise", "train_batch_size": 8, "train_iters": 1,
        "eval_interval": 1, "eval_iters": 0, "rotates_by_length": False,
        "lora_dropout": 0.0, "state_blocks": ()}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path_factory):
    ARGS["index_cache_dir"] = str(tmp_path_factory.mktemp("cache"))


def built(samples: int, **changes):
    args = plain_args(**ARGS | changes)
    return build_preference_sets(args, samples, lambda work: work(), None, DataState())


def build(samples: int = 40, **changes):
    return built(samples, **changes).train


def test_order_and_samples_equal_neox_with_its_error():
    dataset, maps = build(compat_pack_impl=True), golden_maps("pairwise_unpacked")
    assert len(dataset) == 40
    actual_maps = dataset.maps
    # Its order names documents straight, ours their place in doc_idx: the same documents
    np.testing.assert_array_equal(actual_maps.doc_idx[actual_maps.shuffle_idx], maps.doc_idx[maps.shuffle_idx])
    for i in range(20):
        for side, sample in zip(("pos", "neg"), dataset[i].rows, strict=True):
            np.testing.assert_array_equal(sample.tokens, GOLDEN[side][i])
            np.testing.assert_array_equal(sample.labels, GOLDEN[f"{side}_label"][i])


def test_samples_end_with_their_document():
    """GPT-NeoX adds the first token of the next one."""
    dataset = build()
    assert len(dataset) == 48, "whole epochs"
    sample_of_tokens = {dataset[i].rows[0].tokens.tobytes(): dataset[i].rows[0] for i in range(40)}
    for row, label in zip(GOLDEN["pos"], GOLDEN["pos_label"], strict=True):
        wrong = np.flatnonzero(row)[-1]
        assert row[wrong] == 60 and label[wrong] == -100
        right = row.copy()
        right[wrong] = 0
        np.testing.assert_array_equal(sample_of_tokens[right.tobytes()].labels, label)


def test_without_labels_the_prompt_is_what_trl_takes():
    dataset, places = build(pos_train_label_data_paths=None, neg_train_label_data_paths=None), {}
    for chosen, rejected in zip(rows_of(PAIRS["chosen"]), rows_of(PAIRS["rejected"]), strict=True):
        places[tuple(chosen)] = extract_prompt({"chosen": chosen, "rejected": rejected})
    for i in range(24):
        rows = dataset[i].rows
        trl_parts = next(row for text, row in places.items() if tuple(rows[0].tokens[: len(text)]) == text)
        for sample, side in zip(rows, ("chosen", "rejected"), strict=True):
            assert sample.labels[sample.labels >= 0].tolist() == trl_parts[side]
            assert (sample.labels[: len(trl_parts["prompt"])] == -100).all()


def test_too_long_pairs_are_truncated_or_skipped():
    assert len(build(24, seq_length=100).maps.sample_idx) - 1 == 24
    retained = build(24, seq_length=100, allow_chopped=False)
    longest = np.maximum(*(IndexedDataset(PAIRS[name]).sizes for name in ("chosen", "rejected")))
    assert set(retained.maps.doc_idx.tolist()) == set(np.flatnonzero(longest <= 101).tolist()) != set(range(24))


def sides(tmp_path: Path, pos: list[list[int]], neg: list[list[int]]) -> dict:
    paths = {"pos_train_data_paths": (write_rows(tmp_path / "p", pos),),
             "neg_train_data_paths": (write_rows(tmp_path / "n", neg),)}  # fmt: skip
    return paths | {"pos_train_label_data_paths": None, "neg_train_label_data_paths": None}


def test_pairs_without_an_answer_in_reach_are_left_out(tmp_path: Path):
    pos = [[1, 2, 3], [1, 2], [5, 6, 7, 8, 9, 1], [4, 4, 4]]
    neg = [[1, 2, 4], [1, 2, 3], [5, 6, 7, 8, 9, 2], [3, 4]]
    side_paths = sides(tmp_path, pos, neg)
    # 1: nothing comes after the prompt of one side; 2: what differs is cut off
    assert set(build(10, **side_paths, seq_length=4).maps.doc_idx) == {0, 3}
    padding_line, untrained, unreached = built(4, **side_paths, seq_length=4).log_lines
    assert all(
        fact in padding_line for fact in (f"{tmp_path}/p.bin", "2 pairs", "4 rows of 4 tokens", "45.0 % padding")
    )
    assert "1 pairs" in untrained and "number 1" in untrained and "1 pairs" in unreached and "number 2" in unreached
    refused(r"p\.bin: none of 4 documents makes a train sample", build, 4, **side_paths, seq_length=0)


def test_references_of_answers_that_share_a_prompt(tmp_path: Path):
    args = sides(tmp_path, [[9, 8, 8, 1, 2]], [[9, 8, 8, 4]]) | {"seq_length": 8, "pack_impl": "best_fit"}
    write_rows(tmp_path / "p_base", [[7, 7, 7, -1.5, -2.5]], np.float32)
    write_rows(tmp_path / "n_base", [[7, 7, 7, -4.5]], np.float32)
    sample = build(1, precompute_model_name="base", **args)[0]
    assert sample.prefix_lengths.tolist() == [0, 2] and sample.reference_logprobs.tolist() == [-4, -4.5]
    assert sample.rows[0].tokens.tolist() == [9, 8, 8, 1, 2, 8, 4, 0, 0]


def test_references_for_tokens_and_sums(tmp_path: Path):
    args = sides(tmp_path, [[9, 1, 2], [9, 3]], [[9, 4], [9, 5, 6, 7]]) | {"seq_length": 8}
    assert build(2, **args)[0].reference_logprobs is None
    write_rows(tmp_path / "p_base", [[7, -1.5, -2.5], [7, -3.5]], np.float32)
    write_rows(tmp_path / "n_base", [[7, -4.5], [7, -5.5, -6.5, -7.5]], np.float32)
    write_rows(tmp_path / "p_sums", [[-4], [-3.5]], np.float32)
    write_rows(tmp_path / "n_sums", [[-4.5], [-19.5]], np.float32)
    for pack_impl in ("unpacked", "best_fit", "pack_until_overflow"):
        for name in ("base", "sums"):
            dataset = build(2, precompute_model_name=name, pack_impl=pack_impl, **args)
            for i in range(2):
                sums = {0: -4, 1: -4.5, 2: -3.5, 3: -19.5}
                assert dataset[i].reference_logprobs.dtype == np.float32
                assert dataset[i].reference_logprobs.tolist() == [sums[answer] for answer in dataset.documents(i)]
    args["seq_length"] = 2
    truncated = build(2, precompute_model_name="base", **args)
    assert sorted(truncated[i].reference_logprobs.tolist() for i in (0, 1)) == [[-4, -4.5], [-3.5, -12]]
    with pytest.raises(DataError, match=r"n_sums\.bin: .*sums over full documents, but document 1 .* cut to 3 tokens"):
        build(2, precompute_model_name="sums", **args)
    build(2, precompute_model_name="sums", allow_chopped=False, **args)


@pytest.mark.parametrize(("reference", "dtype", "message"), [
    ([[0, 1, 2]], np.float32, "1 documents .*float32.*2"),
    ([[0, 1, 2], [0, 1]], np.int32, "2 documents .*int32.*float32"),
    ([[0, 1, 2], [0, 1, 2]], np.float32, "document 1 .*3 .*2 tokens"),
    ([[0, 1, np.nan], [0, 1]], np.float32, "value 2 "),
])  # fmt: skip
def test_references_that_do_not_fit(reference: list, dtype: type, message: str, tmp_path: Path):
    side_paths = sides(tmp_path, [[9, 1, 2], [9, 3]], [[9, 4], [9, 5, 6, 7]])
    write_rows(tmp_path / "n_base", [[0, 1], [0, 1, 2, 3]], np.float32)
    write_rows(tmp_path / "p_base", reference, dtype)
    refused(message, build, 2, precompute_model_name="base", **side_paths)


def test_sides_that_are_no_pairs(tmp_path: Path):
    """Counted in sequences both sides are as long where a text is empty: a boundary without a sequence."""
    refused(r"p\.bin: 1 documents.*n\.bin .*2", build, 1, **sides(tmp_path, [[1, 2]], [[1, 2], [3]]))
    refused("empty documents", build, 1, **sides(tmp_path, [[1, 2], [], [1, 3]], [[], [1, 4], [1, 5]]))
