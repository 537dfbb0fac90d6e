"""Document, sample and shuffle order against NeoX's golden arrays and a plain reading of the definition."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDataset, build_packed
from megatron.data.index_maps import IndexKey, Packing
from megatron.data.packed_dataset import PackedDataset
from tests.data.samples import DATASET, INDEXMAPS, assert_equal_maps, golden_json, golden_maps, write_dataset

SPLIT = "packed_split_969_30_1"


def _case(name: str) -> tuple[IndexedDataset, dict]:
    """The data of a golden case and build_packed's arguments."""
    summary = golden_json("summary.json")[name]
    dataset, samples = IndexedDataset(DATASET / summary["data"]), summary["num_samples"]
    start, stop = 0, len(dataset)
    if "split_index" in summary:
        part = ["train", "valid", "test"].index(name.split("/")[-1])
        (start, stop), samples = summary["split_index"][part : part + 2], samples[part]
    values = {"start": start, "stop": stop, "num_samples": samples}
    return dataset, values | {key: summary[key] for key in ("seq_length", "seed")}


@pytest.mark.parametrize("name", ["packed_A", "packed_labels_instruct", f"{SPLIT}/train", f"{SPLIT}/valid"])
def test_maps_and_samples_equal_neox(name: str):
    dataset, arguments = _case(name)
    maps = build_packed(dataset.sizes, **arguments)
    assert_equal_maps(maps, golden_maps(name))
    packed = PackedDataset(dataset, maps, arguments["seq_length"])
    # Upstream's len is one short of the windows it built
    assert len(packed) == golden_json("summary.json")[name]["len"] + 1
    samples = np.load(INDEXMAPS / name / "samples.npz")
    for index, text in zip(samples["_index"], samples["text"], strict=True):
        assert packed[int(index)].tokens.dtype == np.int64
        np.testing.assert_array_equal(packed[int(index)].tokens, text)


def _plain_sample_idx(sizes: np.ndarray, doc_idx: np.ndarray, seq_length: int) -> list[list[int]]:
    """Walk the documents token by token, as the definition says."""
    total = int(sizes[doc_idx].sum())
    rows, place, offset = [[0, 0]], 0, 0
    for _ in range((total - 1) // seq_length):
        for _ in range(seq_length):
            while offset >= sizes[doc_idx[place]]:
                place, offset = place + 1, 0
            offset += 1
        while offset >= sizes[doc_idx[place]]:
            place, offset = place + 1, 0
        rows.append([place, offset])
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_maps_equal_a_plain_walk_on_random_documents(seed: int, tmp_path: Path):
    random = np.random.default_rng(seed)
    sizes = random.integers(0 if seed % 2 else 1, random.integers(2, 60), random.integers(1, 30)).astype(np.int32)
    sizes[random.integers(len(sizes))] += 5
    start, stop = 0, len(sizes)
    if seed % 4 == 0:
        start, stop = sorted(random.choice(len(sizes) + 1, 2, replace=False))
        sizes[start] += 3
    seq_length, samples = int(random.integers(1, 40)), int(random.integers(0, 80))
    maps = build_packed(sizes, int(start), int(stop), samples, seq_length, seed)
    assert maps.sample_idx.tolist() == _plain_sample_idx(sizes, maps.doc_idx, seq_length)
    assert len(maps.shuffle_idx) == len(maps.sample_idx) - 1 >= samples
    assert sorted(maps.shuffle_idx) == list(range(len(maps.shuffle_idx)))
    epochs = len(maps.doc_idx) // (stop - start)
    assert sorted(maps.doc_idx.tolist()) == sorted(list(range(start, stop)) * epochs)
    # One epoch less would not do
    tokens = int(sizes[start:stop].sum())
    assert epochs == 1 or ((epochs - 1) * tokens - 1) // seq_length < samples


def test_samples_are_windows_of_the_joined_documents(tmp_path: Path):
    dataset = write_dataset(tmp_path / "x", [3, 50, 1, 0, 7, 20, 2])
    maps = build_packed(dataset.sizes, 0, len(dataset), 30, 8, seed=1)
    packed = PackedDataset(dataset, maps, 8)
    joined = np.concatenate([dataset[i] for i in maps.doc_idx])
    for index, window in enumerate(maps.shuffle_idx.tolist()):
        np.testing.assert_array_equal(packed[index].tokens, joined[window * 8 : window * 8 + 9])
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_a_large_corpus_is_laid_out_to_its_last_window():
    sizes = np.random.default_rng(0).integers(1, 500, 300_000).astype(np.int32)
    maps = build_packed(sizes, 0, len(sizes), 100_000, 512, seed=0)
    assert len(maps.shuffle_idx) == (int(sizes.sum()) - 1) // 512


@pytest.mark.parametrize("change", [
    {"index_sha256": "1" * 64}, {"labels_sha256": "1"}, {"first": 1}, {"last": 8}, {"num_samples": 11},
    {"seq_length": 9}, {"seed": 2}, {"packing": Packing("best_fit")}, {"packing": Packing(truncate_documents=9)},
], ids=str)  # fmt: skip
def test_everything_that_decides_the_maps_is_in_the_cache_key(change: dict):
    values = {"first": 0, "last": 9, "num_samples": 10, "seq_length": 8, "seed": 1, "packing": Packing()}
    key, equal_key = (IndexKey("0" * 64, **values) for _ in range(2))
    assert replace(key, **change).digest != key.digest == equal_key.digest
