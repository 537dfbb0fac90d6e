"""Weights that follow sizes, and weights that change while training."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data import IndexedDataset, build_blend, data_fingerprint, train_loader, write_npy
from megatron.data.blending import build_phases, samples_per_member, weight_phases, weights_by_documents
from tests.data.samples import DATASET, write_dataset
from tests.data.test_loader import make_args as loader_args
from tests.data.test_text_sets import B, build, build_train_blend, make_blend

SCHEDULE = {"weights": ((7.0, 3.0), (0.0, 1.0), (1.0, 1.0)), "until": (40, 60)}


def test_phases_are_counted_in_steps():
    weights = ((1.0, 0.0), (0.0, 1.0))
    assert weight_phases((40,), weights, 8, 1000) == ((320, weights[0]), (680, weights[1]))
    # A run that ends before a phase leaves it out
    assert weight_phases((40,), weights, 8, 100) == ((100, weights[0]), (0, weights[1]))


def test_each_phase_is_a_blend_that_goes_on_where_the_sets_stopped():
    maps = build_phases(((320, (7.0, 3.0)), (160, (0.0, 1.0)), (520, (1.0, 1.0)), (0, (1.0, 0.0))))
    first_phase, last_phase = build_blend([7, 3], 320), build_blend([1, 1], 520)
    np.testing.assert_array_equal(maps.dataset_index[:320], first_phase.dataset_index)
    np.testing.assert_array_equal(maps.dataset_sample_index[:320], first_phase.dataset_sample_index)
    assert (maps.dataset_index[320:480] == 1).all()
    np.testing.assert_array_equal(maps.dataset_index[480:], last_phase.dataset_index)
    for d in (0, 1):
        numbers = maps.dataset_sample_index[maps.dataset_index == d]
        np.testing.assert_array_equal(numbers, np.arange(maps.drawn[d]))
    assert maps.drawn.tolist() == [224 + 260, 96 + 160 + 260]


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_draws_no_more_than_is_prepared(seed: int):
    random = np.random.default_rng(seed)
    sets, rows = int(random.integers(2, 9)), range(random.integers(1, 5))
    weights = [random.random(sets) * (random.random(sets) < 0.7) + np.eye(sets)[random.integers(sets)] for _ in rows]
    phases = tuple((int(random.integers(0, 700)), tuple(row.tolist())) for row in weights)
    prepared = np.sum([samples_per_member(row, samples) for samples, row in phases], axis=0)
    maps = build_phases(phases)
    assert (maps.drawn <= prepared).all() and maps.drawn.sum() == len(maps.dataset_index)


def test_a_scheduled_set_of_a_run(tmp_path: Path):
    args = make_blend(tmp_path, train_data_weights=None, train_data_weight_schedule=SCHEDULE)
    train = build_train_blend(args)
    set_numbers = np.asarray(train.maps.dataset_index)
    phase_counts = [np.bincount(part, minlength=2).tolist() for part in np.split(set_numbers, (320, 480))]
    assert len(set_numbers) == 1000 and phase_counts == [[224, 96], [0, 160], [260, 260]]
    # The beginning is the beginning of the run without a schedule
    unscheduled = build_train_blend(make_blend(tmp_path, train_iters=40))
    np.testing.assert_array_equal(unscheduled.maps.dataset_index, set_numbers[:320])
    fingerprint = data_fingerprint(args)
    assert fingerprint["train_1"]["weight"] == {"until": [40, 60], "weights": [0.3, 1.0, 0.5]}
    later_schedule = {"train_data_weight_schedule": {**SCHEDULE, "until": (40, 61)}}
    assert data_fingerprint(make_blend(tmp_path, train_data_weights=None, **later_schedule)) != fingerprint


@pytest.mark.parametrize(("micro", "size"), [(2, 1), (1, 4), (4, 2)])
def test_a_run_goes_on_anywhere_in_any_layout(micro: int, size: int, tmp_path: Path):
    """Through the phases of a schedule, over sets of all formats."""
    write_npy(IndexedDataset(B), tmp_path / "rows", 47)
    paths = (str(tmp_path / "rows"), str(DATASET / "corpusA_lazy_text_document"))
    args = make_blend(tmp_path, train_data_paths=paths, train_data_weights=None, train_data_weight_schedule=SCHEDULE)
    train = build(args).train
    for consumed in (0, 8 * 39, 8 * 41, 8 * 100):
        layout = {"data_size": size, "consumed_samples": consumed}
        loaders = [train_loader(train, loader_args(micro, size), data_rank=rank, **layout) for rank in range(size)]
        for start in range(consumed, consumed + 24, 8):
            ranks = [next(loader) for loader in loaders]
            actual = torch.cat([batch.tokens for several in zip(*ranks, strict=True) for batch in several])
            expected = np.stack([train[i].tokens[:-1] for i in range(start, start + 8)])
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("unit", "alpha", "sizes"), [
    ("documents", 1.0, (80, 30)), ("documents", 0.0, (80, 30)), ("tokens", 1.0, (7074, 3197)),
    ("tokens", 0.5, (7074, 3197)), ("bytes", 1.0, (14148, 6394)),
])  # fmt: skip
def test_weights_follow_sizes(unit: str, alpha: float, sizes: tuple[int, int], tmp_path: Path):
    args = make_blend(tmp_path, train_data_weights=None, weight_by=unit, weighted_sampler_alpha=alpha)
    weights = [data_fingerprint(args)[f"train_{i}"]["weight"] for i in (0, 1)]
    powers = [size**alpha for size in sizes]
    assert weights == pytest.approx([power / sum(powers) for power in powers], rel=1e-12)
    assert weights == pytest.approx(weights_by_documents(sizes, alpha))
    counts = np.bincount(build_train_blend(args).maps.dataset_index)
    np.testing.assert_allclose(counts, 1000 * np.array(weights), atol=1)


def test_bytes_weigh_the_stored_size(tmp_path: Path):
    types = (np.int32, np.uint16)
    paths = tuple(write_dataset(tmp_path / kind.__name__, [400], dtype=kind).prefix for kind in types)
    for unit, expected in (("tokens", 1 / 2), ("bytes", 2 / 3)):
        args = make_blend(tmp_path, train_data_paths=paths, train_data_weights=None, weight_by=unit)
        assert data_fingerprint(args)["train_0"]["weight"] == pytest.approx(expected, rel=1e-15)


def test_a_blend_of_seven_hundred_sets(tmp_path: Path):
    """Upstream ends at 255 sets, a system often at 1024 open files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    paths = tuple(write_dataset(tmp_path / f"{i}", [70 + i % 7], seed=i).prefix for i in range(700))
    args = make_blend(tmp_path, train_data_paths=paths, train_data_weights=None, weight_by="tokens",
                      train_iters=175, padded_vocab_size=100)  # fmt: skip
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        train = build_train_blend(args)
        data_fingerprint(args)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert train.maps.dataset_index.dtype == np.uint16
    counts = np.bincount(train.maps.dataset_index, minlength=700)
    assert set(counts) <= {1, 2, 3} and counts.sum() == 1400
    assert train[0].tokens.shape == (65,)
