"""An order that is extended: what was laid out stays, what comes behind it is laid out by itself."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.data import DataState, build_packed, data_fingerprint, epoch_iterations, order_keys, order_sha256
from megatron.data.index_maps import IndexMaps, segment_generators
from megatron.data.packing import build_maps
from tests.data.samples import INDEXMAPS, golden_maps
from tests.data.test_index_maps import _case
from tests.data.test_packing import golden as build_golden
from tests.data.test_text_sets import A, B, build, make_args, make_blend


def begins_as(longer: IndexMaps, maps: IndexMaps) -> None:
    for name, array in vars(maps).items():
        np.testing.assert_array_equal(getattr(longer, name)[: len(array)], array, err_msg=name)


@pytest.mark.parametrize("name", ["packed_A", "packed_split_969_30_1/train"])
def test_windows_of_neox_stay_and_the_rest_follows(name: str):
    dataset, arguments = _case(name)
    golden = golden_maps(name)
    windows = len(golden.shuffle_idx)
    longer = build_packed(dataset.sizes, **arguments | {"num_samples": 3 * windows}, earlier_ends=(windows,))
    begins_as(longer, golden)
    # Behind them every further window once, of whole epochs, in an order of its own
    further = longer.shuffle_idx[windows:].tolist()
    assert further != sorted(further) == list(range(windows, len(longer.shuffle_idx))) and len(further) >= 2 * windows
    counts = np.bincount(longer.doc_idx)[arguments["start"] : arguments["stop"]]
    assert (counts == counts[0]).all()
    # And once more: both segments stay
    segment_ends = (windows, len(longer.shuffle_idx))
    longest = build_packed(dataset.sizes, **arguments | {"num_samples": 9 * windows}, earlier_ends=segment_ends)
    begins_as(longest, longer)


def test_every_segment_has_an_order_of_its_own():
    orders = [tuple(generator.permutation(50)) for generator in segment_generators(7, 3)]
    assert orders[0] == tuple(np.random.RandomState(7).permutation(50)) and len(set(orders)) == 3


@pytest.mark.parametrize("name", sorted(p.name for p in INDEXMAPS.glob("*") if p.name.startswith(("over", "unpacked"))))
def test_whole_documents_of_neox_stay_and_the_rest_follows(name: str):
    """`compat_pack_impl`, whose shuffle depends on the number of samples."""
    case, samples = build_golden(name, compat=True)
    count, sizes = len(samples.maps.shuffle_idx), samples.indexed.sizes
    size_args = (0, len(sizes), 2 * count, case["seq_length"], case["seed"])
    longer = build_maps(sizes, *size_args, samples.packing, samples.labels if case["label"] else None, (count,))
    begins_as(longer, golden_maps(name))
    assert sorted(longer.shuffle_idx) == list(range(2 * count))


TWO_SETS = {"data_path": None, "train_data_paths": (A, B)}
BLEND = TWO_SETS | {"train_data_weights": (7.0, 3.0)}
PHASES = {"until": (10, 30), "weights": ((1.0, 0.0), (0.5, 0.5), (0.2, 0.8))}
SETS = {
    "one": {},
    "truncated": {"truncate_documents": 40},
    "listed": {"data_path": None, "train_data_paths": (A,)},
    "blend": BLEND,
    "schedule": TWO_SETS | {"train_data_weight_schedule": PHASES},
    "best_fit": {"pack_impl": "best_fit"},
    "blocks": {"drop_last": True},
    "compat": {"compat_pack_impl": True, "pack_impl": "unpacked"},
    "compat blend": BLEND | {"compat_pack_impl": True, "pack_impl": "pack_until_overflow"},
}


@pytest.mark.parametrize("name", SETS)
def test_a_run_that_gets_longer_or_shorter_keeps_its_order(name: str, tmp_path: Path):
    """DataState for 40 steps of 8, stopped after 35; then 50, 400 and 36 of them."""
    keys = {"index_cache_dir": str(tmp_path), "train_iters": 40, **SETS[name]}
    first_run = build(make_args(**keys))
    train, segment_ends = first_run.train, first_run.segment_ends
    samples = [list(train.pieces(i)) for i in range(len(train))]
    for steps in (50, 400, 36, 500):
        longer = build(make_args(**keys | {"train_iters": steps}), data_state=DataState(35, 280, segment_ends))
        assert longer.train is not None and len(longer.train) >= steps * 8
        longer_samples = [list(longer.train.pieces(i)) for i in range(min(len(longer.train), len(train)))]
        if name == "compat blend":  # rows that were the last ones now have the token that follows
            longer_samples = [
                new_pieces[: len(old_pieces)] for new_pieces, old_pieces in zip(longer_samples, samples, strict=False)
            ]
        assert longer_samples == samples[: len(longer_samples)]
        assert order_sha256(longer.train, 280) == order_sha256(train, 280)
        segment_ends = longer.segment_ends
    for describe in (order_keys, data_fingerprint):
        assert describe(make_args(**keys)) == describe(make_args(**keys | {"train_iters": 400}))


def test_without_what_was_begun_the_order_is_another(tmp_path: Path):
    """Without the earlier segment ends, runs of different lengths have different orders."""
    short_run, long_run = (build(make_args(index_cache_dir=str(tmp_path), train_iters=n)).train for n in (10, 400))
    assert order_sha256(short_run, 80) != order_sha256(long_run, 80)


def test_the_order_of_two_samples_includes_the_last():
    class Samples:
        def __init__(self, *begins: int) -> None:
            self._begins = begins

        def pieces(self, index: int) -> Iterator[tuple[int, int]]:
            yield 0, self._begins[index]

    assert order_sha256(Samples(0, 7), 2) != order_sha256(Samples(0, 8), 2)


def test_no_sample_is_lost_or_repeated_where_epochs_meet(tmp_path: Path):
    """Each window of joined epochs comes once, also in a member of a blend."""
    first_run = build(make_blend(tmp_path))
    longer = build(make_blend(tmp_path, train_iters=400), data_state=DataState(125, 1000, first_run.segment_ends))
    for member, ends in zip(longer.train.members, longer.segment_ends["train"], strict=True):
        assert len(ends) == 2 and len(member) == ends[-1]
        tokens = sum(count for i in range(len(member)) for _, _, count in member.pieces(i))
        assert tokens == len(member) * 65, "windows of 64 tokens and one"
        assert sorted(member.maps.shuffle_idx.tolist()) == list(range(ends[-1]))
        # All tokens of the joined documents but what is left at the very end
        joined = int(member.indexed.sizes[member.maps.doc_idx].sum())
        assert 64 * ends[-1] < joined <= 64 * ends[-1] + 64
        epochs = np.bincount(member.maps.doc_idx)
        assert (epochs == epochs[0]).all()


def test_a_run_that_goes_on_finds_its_maps(tmp_path: Path):
    args = make_blend(tmp_path)
    first_run = build(args)
    map_files = set((tmp_path / "cache").iterdir())
    second_run = build(args, data_state=DataState(100, 800, first_run.segment_ends))
    assert second_run.segment_ends == first_run.segment_ends and set((tmp_path / "cache").iterdir()) == map_files


def test_validation_samples_stay(tmp_path: Path):
    """GPT-NeoX takes them from an order that depends on how often is validated."""
    keys = {"index_cache_dir": str(tmp_path), "split": "50,50,0", "seq_length": 32}
    first_run = build(make_args(**keys))
    longer = build(make_args(**keys, train_iters=2000), data_state=DataState(25, 200, first_run.segment_ends))
    assert first_run.segment_ends["valid"] != longer.segment_ends["valid"]
    valid = [[list(run.valid.pieces(i)) for i in range(len(first_run.valid))] for run in (first_run, longer)]
    assert valid[0] == valid[1]
    stateless = build(make_args(**keys, train_iters=2000)).valid
    assert [list(stateless.pieces(i)) for i in range(len(first_run.valid))] != valid[0]


def test_another_batch_size_takes_what_is_left(tmp_path: Path):
    """Samples are counted, not steps: 100 steps of 8, then 25 of 16."""
    keys = {"index_cache_dir": str(tmp_path), "eval_iters": 0}
    first_run = build(make_args(**keys, train_iters=100))
    longer = build(make_args(**keys, train_iters=125), batch=16, data_state=DataState(100, 800, first_run.segment_ends))
    assert len(longer.train) >= 1200
    assert order_sha256(longer.train, 800) == order_sha256(first_run.train, 800)
    passes, samples = make_args(**keys, train_epochs=3), 3 * 107
    assert epoch_iterations(passes, 8) == epoch_iterations(passes, 8, DataState(10, 80)) == samples // 8
    assert epoch_iterations(passes, 16, DataState(10, 80)) == 10 + (samples - 80) // 16
    assert epoch_iterations(passes, 16, DataState(50, 400)) == 50, "fewer passes than were made: nothing is left"
