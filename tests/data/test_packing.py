"""Rows of whole documents and of blocks: against TRL, group_texts, GPT-NeoX's arrays, and properties."""

from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import IndexedDataset
from megatron.data.index_maps import Packing
from megatron.data.labels import has_label
from megatron.data.packed_dataset import PackedDataset
from megatron.data.packing import best_fit, build_maps, next_fit
from tests.data.samples import DATASET, INDEXMAPS, assert_equal_maps, golden_json, golden_maps

ROWS_OF_DOCUMENTS = ("pack_until_overflow", "unpacked", "best_fit")
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60)


class Memory(IndexedDataset):
    """Documents in memory: token number k of all documents is k + 1, so that every one can be recognised."""

    def __init__(self, lengths, values=None):
        self.sizes = np.array(lengths, np.int32)
        self.dtype, self.data_file = np.dtype(np.int32), Path("memory.bin")
        self.pointers = (np.cumsum(self.sizes) - self.sizes).astype(np.int64) * 4
        self.tokens = np.arange(1, self.sizes.sum() + 1, dtype=np.int32) if values is None else values


def packed(text, num_samples: int, seq: int, seed: int, packing: Packing, span=None, **columns) -> PackedDataset:
    """Rows of all documents, or of a span of them, with columns of labels and rewards."""
    maps = build_maps(text.sizes, *(span or (0, len(text))), num_samples, seq, seed, packing, columns.get("labels"))
    return PackedDataset(text, maps, seq, packing=packing, **columns)


@pytest.mark.parametrize("seed", range(12))
def test_best_fit_has_the_bins_of_trl(seed: int):
    from datasets import Dataset  # takes seconds
    from trl.data_utils import pack_dataset

    random = np.random.default_rng(seed)
    capacity = int(random.integers(2, 100))
    lengths = random.integers(1, random.integers(1, capacity + 1) + 1, random.integers(1, 1500)).tolist()
    ids = [[number] * length for number, length in enumerate(lengths)]
    trl_rows = pack_dataset(Dataset.from_dict({"input_ids": ids}), capacity, "bfd", {"batch_size": None})
    order, starts = best_fit(np.array(lengths), capacity)
    bins = [order[a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]
    assert bins == [list(dict.fromkeys(row)) for row in trl_rows["input_ids"]]
    assert all(sum(lengths[i] for i in row) <= capacity for row in bins)


def test_many_documents_fill_their_rows():
    lengths = np.random.default_rng(0).geometric(1 / 600, 100_000).clip(1, 2049)
    order, starts = best_fit(lengths, 2049)
    filled = np.add.reduceat(lengths[order], starts[:-1])
    assert filled.max() <= 2049 and filled.mean() / 2049 > 0.999
    assert np.array_equal(np.sort(order), np.arange(len(lengths)))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 50))
def test_until_overflow_is_the_plain_rule(lengths: list[int], capacity: int):
    expected, room = [0], capacity
    for number, length in enumerate(min(length, capacity) for length in lengths):
        if length > room:
            expected.append(number)
            room = capacity
        room -= length
    assert next_fit(np.array(lengths), capacity).tolist() == [*expected, len(lengths)]


def group_texts(texts: list[list[int]], block_size: int) -> list[list[int]]:
    """As run_clm.py of HuggingFace's examples groups one batch of `map`."""
    joined = list(chain(*texts))
    total = len(joined) // block_size * block_size
    return [joined[i : i + block_size] for i in range(0, total, block_size)]


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 30), st.integers(1, 45), st.one_of(st.none(), st.integers(1, 20)))
def test_blocks_are_those_of_group_texts(lengths: list[int], seq: int, truncate: int, batch: int | None):
    text = Memory(lengths)
    packing = Packing(truncate_documents=truncate, drop_last=True, group_texts_batch=batch)
    documents = [text[i][:truncate].tolist() for i in range(len(text))]
    size = batch or len(documents)
    expected = [block for i in range(0, len(documents), size) for block in group_texts(documents[i : i + size], seq)]
    samples = packed(text, 1, seq, 7, packing)
    assert sorted(sample.tokens[:-1].tolist() for sample in map(samples.__getitem__, range(len(samples)))) == expected
    # A block predicts its own tokens only
    assert all(samples[i].labels[-1] == -100 and (samples[i].labels[:-1] > 0).all() for i in range(len(samples)))
    samples = packed(text, 1, seq, 7, replace(packing, drop_last=False))
    trained = np.concatenate([samples[i].labels[samples[i].labels >= 0] for i in range(len(samples))] or [[]])
    assert sorted(trained) == sorted(chain(*documents)), "with the last ones, every token is there"


@settings(max_examples=150, deadline=None)
@given(
    LENGTHS, st.sampled_from(ROWS_OF_DOCUMENTS), st.integers(1, 50), st.booleans(), st.booleans(),
    st.one_of(st.none(), st.integers(1, 45)), st.integers(0, 99), st.data(),
)  # fmt: skip
def test_rows_of_full_documents(lengths, pack_impl, seq, chop, masked, truncate, seed, data):
    """No row overflows, no token comes twice in an epoch or from outside the split, no padding is trained."""
    text = Memory(lengths)
    start, stop = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    prompts = data.draw(st.lists(st.integers(0, 45), min_size=len(text), max_size=len(text)))
    answers = [np.where(np.arange(lengths[i]) < prompt, -100, text[i]) for i, prompt in enumerate(prompts)]
    labels = Memory(lengths, np.concatenate(answers)) if masked else None
    packing = Packing(pack_impl, allow_chopped=chop, truncate_documents=truncate)
    samples = packed(text, 100, seq, seed, packing, (start, stop), labels=labels)
    rows = len(samples.maps.sample_idx) - 1
    expected = []
    for i in range(start, stop):
        document = text[i][:truncate]
        learnt = labels is None or (labels[i][1 : min(len(document), seq + 1)] >= 0).any()
        if len(document) and learnt and (chop or len(document) <= seq + 1):
            expected += document[: seq + 1].tolist()
    assert bool(expected) == bool(rows)
    if not rows:
        return
    assert len(samples) % rows == 0 and 100 <= len(samples) < 100 + rows
    for epoch in range(0, len(samples), rows):
        token_counts: Counter[int] = Counter()
        for sample in map(samples.__getitem__, range(epoch, epoch + rows)):
            real = sample.tokens > 0
            assert real[0] and (np.diff(real.astype(int)) <= 0).all(), "tokens, then padding"
            assert (sample.labels[~real] == -100).all()
            trained = sample.labels >= 0
            assert (sample.labels[trained] == sample.tokens[trained]).all(), "labels line up"
            if labels is None:
                assert trained[real].all()
            else:
                assert trained.any(), "nothing to learn"
            begins = np.flatnonzero(sample.begins)
            assert begins[0] == 0 and (len(begins) == 2 - real.all() or pack_impl != "unpacked")
            # Documents are whole, in one piece
            for a, b in zip(begins, [*begins[1:], seq + 1], strict=True):
                piece = sample.tokens[a:b]
                assert not piece.any() or (np.diff(piece) == 1).all()
            token_counts.update(sample.tokens[real].tolist())
        assert token_counts == Counter(expected)


@pytest.mark.parametrize("pack_impl", ROWS_OF_DOCUMENTS)
def test_a_label_of_its_first_token_alone_makes_no_document_usable(pack_impl: str):
    labels = Memory([1, 5], np.array([1, -100, -100, 4, 5, 6]))
    samples = packed(Memory([1, 5]), 1, 8, 7, Packing(pack_impl), labels=labels)
    assert set(samples.maps.doc_idx.tolist()) == {1}


def test_more_samples_only_go_on():
    sizes = np.arange(1, 40, dtype=np.int32)
    for pack_impl in ROWS_OF_DOCUMENTS:
        short_maps, long_maps = (build_maps(sizes, 0, 39, n, 64, 5, Packing(pack_impl)) for n in (10, 500))
        assert np.array_equal(short_maps.doc_idx, long_maps.doc_idx) and np.array_equal(
            short_maps.sample_idx, long_maps.sample_idx
        )
        assert np.array_equal(short_maps.shuffle_idx, long_maps.shuffle_idx[: len(short_maps.shuffle_idx)])
        assert sorted(short_maps.shuffle_idx) == list(range(len(short_maps.sample_idx) - 1))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 9), st.integers(0, 45), st.data())
def test_documents_with_labels(lengths: list[int], begin: int, end: int, data):
    values = np.array(data.draw(st.lists(st.sampled_from([-100, 5]), min_size=sum(lengths), max_size=sum(lengths))))
    labels = Memory(lengths, values)
    start = data.draw(st.integers(0, len(lengths)))
    expected = [bool((labels[i][begin:end] >= 0).any()) for i in range(start, len(lengths))]
    assert has_label(labels, start, len(lengths), begin, end).tolist() == expected


# -- GPT-NeoX's arrays ---------------------------------------------------------------------------------------

GOLDEN = sorted(path.name for path in INDEXMAPS.glob("*") if path.name.startswith(("overflow", "unpacked")))


def golden(name: str, compat: bool) -> tuple[dict, PackedDataset]:
    case = golden_json("summary.json")[name]
    text, labels, rewards = (case[key] and IndexedDataset(DATASET / case[key]) for key in ("data", "label", "reward"))
    packing = Packing(case["pack_impl"], allow_chopped=case["allow_chopped"], compat=compat)
    size_args = (case["num_samples"], case["seq_length"], case["seed"])
    return case, packed(text, *size_args, packing, labels=labels, rewards=rewards)


@pytest.mark.parametrize("name", GOLDEN)
def test_compat_pack_impl_is_neox(name: str):
    case, samples = golden(name, compat=True)
    maps = samples.maps
    assert_equal_maps(maps, golden_maps(name))
    assert len(samples) == case["len"] + 1  # upstream's is one short
    recorded = np.load(INDEXMAPS / name / "samples.npz")
    for place, index in enumerate(recorded["_index"].tolist()):
        sample = samples[index]
        if name.startswith("overflow") and maps.shuffle_idx[index] == len(maps.shuffle_idx) - 1:
            # Upstream reads past its arrays here, and takes another sample instead
            documents = maps.doc_idx[maps.sample_idx[-2, 0] :]
            assert sample.tokens[: samples.indexed.sizes[documents[0]]].tolist() == list(samples.indexed[documents[0]])
            continue
        np.testing.assert_array_equal(sample.tokens, recorded["text"][place])
        if "label" in recorded:
            np.testing.assert_array_equal(sample.labels, recorded["label"][place])
        if "reward" in recorded:
            length = samples.indexed.sizes[maps.doc_idx[maps.shuffle_idx[index]]]
            assert (recorded["reward"][place][:length] == sample.reward).all()


@pytest.mark.parametrize("name", GOLDEN)
def test_rows_equal_neox_but_for_what_is_wrong_there(name: str):
    """Every row that GPT-NeoX made of the same documents is the same but for the token that follows them."""
    case, samples = golden(name, compat=False)
    recorded, maps, neox_maps, compared = np.load(INDEXMAPS / name / "samples.npz"), samples.maps, golden_maps(name), 0
    borders = pairwise(maps.sample_idx[:, 0].tolist())
    row_numbers = {tuple(maps.doc_idx[a:b].tolist()): row for row, (a, b) in enumerate(borders)}
    for place, index in enumerate(recorded["_index"].tolist()):
        row = neox_maps.shuffle_idx[index]
        documents = tuple(neox_maps.doc_idx[neox_maps.sample_idx[row, 0] : neox_maps.sample_idx[row + 1, 0]].tolist())
        if documents not in row_numbers:
            continue
        compared += 1
        sample = samples[maps.shuffle_idx.tolist().index(row_numbers[documents])]
        length = min(int(samples.indexed.sizes[list(documents)].sum()), case["seq_length"] + 1)
        np.testing.assert_array_equal(sample.tokens[:length], recorded["text"][place][:length])
        np.testing.assert_array_equal(sample.labels[:length], recorded["label"][place][:length])
        assert not sample.tokens[length:].any() and (sample.labels[length:] == -100).all()
        np.testing.assert_array_equal(recorded["text"][place][length + 1 :], sample.tokens[length + 1 :])
    assert compared >= (1 if "overflow" in name else 20)


def test_compat_goes_on_where_upstream_fails():
    """overflow_A_nochop: a left-out document ends an epoch; unpacked_nolabel: no labels."""
    text = IndexedDataset(DATASET / "corpusA_text_document")
    maps = packed(text, 100, 64, 1234, Packing("pack_until_overflow", allow_chopped=False, compat=True)).maps
    assert len(maps.shuffle_idx) == 100 and text.sizes[maps.doc_idx].max() <= 65
    samples = packed(text, 25, 64, 1234, Packing("unpacked", compat=True), (60, 70))
    maps = samples.maps
    assert maps.doc_idx.tolist() == [*range(10), *range(10), *range(6)], "the split is ignored, as there"
    short = next(i for i in range(25) if text.sizes[maps.doc_idx[maps.shuffle_idx[i]]] < 60)
    assert (samples[short].labels == samples[short].tokens).all(), "padding is trained, as there"


def test_compat_fills_rows_to_the_last_token():
    maps = build_maps(np.full(6, 2, np.int32), 0, 6, 4, 3, 1, Packing("pack_until_overflow", compat=True))
    # Upstream stops at the first document of the last row
    assert np.diff(maps.sample_idx[:, 0]).tolist() == [2, 2, 2, 1]


def test_compat_of_documents_that_cannot_be_used_is_empty():
    maps = build_maps(np.full(3, 9, np.int32), 0, 3, 5, 4, 1, Packing("unpacked", allow_chopped=False, compat=True))
    assert len(maps.sample_idx) < 2
