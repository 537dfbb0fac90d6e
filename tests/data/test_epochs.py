"""`train_epochs`: how many iterations they are, and what they visit."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron.data import DataError, IndexedDataset, epoch_iterations, write_npy
from megatron.data.blending import EpochKey
from tests.data.samples import DATASET, golden_json
from tests.data.test_text_sets import A, B, build, make_args

GOLDEN = golden_json("summary.json")["packed_split_epochs1/train"]


def make(tmp_path: Path, **changes):
    """A configuration of three passes, and its training set."""
    args = make_args(train_epochs=3, train_iters=None, eval_iters=0, index_cache_dir=str(tmp_path), **changes)
    args.train_iters = epoch_iterations(args, 8)
    return args, build(args, epochs=3).train


def test_every_epoch_visits_every_window_once_in_one_order(tmp_path: Path):
    args, train = make(tmp_path)
    maps = train.dataset.maps
    for name in ("doc_idx", "sample_idx", "shuffle_idx"):
        assert list(getattr(maps, name).shape) == GOLDEN[f"{name}_shape"]
    # Upstream leaves out a sample of each epoch, and what fills no batch of it
    size = GOLDEN["len"] + 1
    assert len(train) == 3 * size and args.train_iters == 3 * size // 8
    samples = np.stack([train[i].tokens for i in range(len(train))]).reshape(3, size, -1)
    assert len(np.unique(maps.shuffle_idx)) == size and (samples == samples[0]).all()
    with pytest.raises(IndexError):
        train[len(train)]


def test_epochs_of_several_sets_visit_each_sample_once(tmp_path: Path):
    """In one order, whatever the format; two of the sets hold the same text."""
    write_npy(IndexedDataset(B), tmp_path / "rows", 47)
    paths = (A, str(tmp_path / "rows"), str(DATASET / "corpusA_lazy_text_document"))
    args, train = make(tmp_path, data_path=None, train_data_paths=paths, seq_length=32)
    sizes = [len(member) for member in train.dataset.members]
    assert sizes == [7073 // 32, (3197 // 47 * 47 - 1) // 32, 7073 // 32] and args.train_iters == 3 * sum(sizes) // 8
    samples = [tuple(train[i].tokens) for i in range(len(train))]
    epoch_counts = Counter(tuple(member[i].tokens) for member in train.dataset.members for i in range(len(member)))
    assert Counter(samples[: sum(sizes)]) == epoch_counts and samples == samples[: sum(sizes)] * 3


def test_sets_are_spread_over_the_epoch():
    counts = (1000, 10, 333)
    maps = EpochKey(counts).build()
    assert tuple(maps.drawn) == counts
    for number, count in enumerate(counts):
        places = np.flatnonzero(maps.dataset_index == number)
        assert maps.dataset_sample_index[places].tolist() == list(range(count))
        due = (np.arange(count) + 0.5) / count * sum(counts)
        assert np.abs(places - due).max() < 3


def test_less_than_a_batch_is_refused(tmp_path: Path):
    args, _ = make(tmp_path)
    with pytest.raises(DataError, match="train_epochs: 3 .*107 .*train_batch_size of 400"):
        epoch_iterations(args, 400)


def test_data_seed_is_the_seed_of_the_order(tmp_path: Path):
    def order(**seeds) -> list[int]:
        return build(make_args(index_cache_dir=str(tmp_path), **seeds)).train.maps.shuffle_idx.tolist()

    assert order(seed=5, data_seed=1234) == order(seed=1234)
    assert order(seed=1234, data_seed=5) == order(seed=5) != order(seed=1234)
