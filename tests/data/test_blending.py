"""The order of blended sets against NeoX's golden arrays and a plain loop over its definition."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.data import DataError, build_blend
from megatron.data import blending as room
from megatron.data.blending import BlendedDataset, BlendMaps, normalized, samples_per_member, weights_by_documents
from tests.data.samples import INDEXMAPS, golden_json


def _reference_blend(weights: list[float], num_samples: int) -> tuple[list[int], list[int]]:
    """The definition, one sample after the other."""
    shares = normalized(weights)
    shares = (shares / np.sum(shares)).tolist()
    counts, members, number = [0.0] * len(shares), [], []
    for i in range(num_samples):
        errors = [share * float(max(i, 1)) - count for share, count in zip(shares, counts, strict=True)]
        best = errors.index(max(errors))
        members.append(best)
        number.append(int(counts[best]))
        counts[best] += 1
    return members, number


def _assert_equals_reference(maps: BlendMaps, weights: list[float]) -> None:
    members, number = _reference_blend(weights, len(maps.dataset_index))
    np.testing.assert_array_equal(maps.dataset_index, members)
    np.testing.assert_array_equal(maps.dataset_sample_index, number)
    np.testing.assert_array_equal(maps.drawn, np.bincount(members, minlength=len(weights)))


@pytest.mark.parametrize("name", ["blendable_A_B_total1000", "w05_05", "w07_03", "w3", "w_equal3", "w_tiny"])
def test_order_equals_neox(name: str):
    golden = np.load(INDEXMAPS / "blending" / f"{name}.npz")
    maps = build_blend(golden["weights"].tolist(), len(golden["dataset_index"]))
    assert maps.dataset_index.dtype == golden["dataset_index"].dtype
    for field in ("dataset_index", "dataset_sample_index"):
        np.testing.assert_array_equal(getattr(maps, field), golden[field])


@pytest.mark.parametrize("seed", range(60))
def test_order_equals_a_plain_loop(seed: int):
    """Blocks are split into many short lanes, so that wrong beginnings abound. Weights are smooth, whole
    numbers (many exact ties), equal, steep, or some far smaller than the rest."""
    random = np.random.default_rng(seed)
    sets = int(random.integers(1, 12))
    weights = [random.random(sets) + 1e-3, random.integers(1, 6, sets), np.full(sets, random.random()),
               0.5 ** np.arange(sets), 10.0 ** -random.uniform(0, 6, sets)][random.integers(5)].tolist()  # fmt: skip
    samples = int(random.integers(0, 600))
    lanes, length, warm_up = int(random.integers(1, 9)), int(random.integers(1, 40)), int(random.integers(0, 20))
    _assert_equals_reference(build_blend(weights, samples, lanes=lanes, lane_length=length, warm_up=warm_up), weights)


@pytest.mark.parametrize("weights", [[0.7, 0.3], [5, 3, 1, 1], [1] * 7, [0.6, 0.4, 1e-4], [0.1, 0.2, 0.3, 0.4]])
def test_order_equals_a_plain_loop_as_it_is_cut_in_earnest(weights: list[float]):
    _assert_equals_reference(build_blend(weights, 20_000), weights)


def test_order_does_not_depend_on_the_guess(monkeypatch: pytest.MonkeyPatch):
    runs, _draw = [], room._draw

    def draw(weights: np.ndarray, begins: np.ndarray, state: np.ndarray, steps: int):
        runs.append(len(begins))
        return _draw(weights, begins, state, steps)

    monkeypatch.setattr(room, "_draw", draw)
    build_blend([5, 3, 1], 1000, lane_length=100)
    assert runs == [9, 10]  # the run-up, then every lane right at once
    monkeypatch.setattr(room, "_share_out", lambda weights, samples: np.zeros((len(samples), len(weights))))
    runs.clear()
    _assert_equals_reference(build_blend([5, 3, 1], 1000, lane_length=100), [5, 3, 1])
    # The first two begin where nothing is drawn indeed; then the end of each sets the next one right
    assert runs == [9, 10, *range(8, 0, -1)]


def test_more_than_255_sets():
    """Upstream's set numbers are bytes."""
    random = np.random.default_rng(0)
    for sets, dtype in ((256, np.uint8), (257, np.uint16), (400, np.uint16)):
        weights = random.random(sets).tolist()
        maps = build_blend(weights, 1500, lane_length=300)
        assert maps.dataset_index.dtype == dtype and maps.dataset_index.max() == sets - 1
        _assert_equals_reference(maps, weights)


def test_a_million_samples_are_counted_right():
    maps = build_blend([0.5, 0.3, 0.15, 0.05], 1_000_000)
    np.testing.assert_array_equal(maps.drawn, [500_000, 300_000, 150_000, 50_000])
    assert maps.dataset_sample_index.dtype == np.uint32 and maps.dataset_sample_index.max() == 499_999


def test_wanted_samples_equal_neox():
    for case, golden in golden_json("normalized_weights_and_num_samples.json").items():
        weights, samples = case.split("|")
        assert normalized(json.loads(weights)).tolist() == golden["weights"]
        if samples != "None":
            assert samples_per_member(json.loads(weights), int(samples)) == golden["num_samples"]


def test_weights_by_documents_as_in_neox():
    golden = golden_json("weights_by_num_docs.json")
    assert len(golden) == 30
    for case, weights in golden.items():
        documents, alpha = case.split("|alpha=")
        assert list(weights_by_documents(json.loads(documents), float(alpha), compat=True)) == weights, case


class _Numbers:
    """A set whose sample i is (set, i)."""

    def __init__(self, number: int, length: int):
        self.number, self.length, self.indexed = number, length, SimpleNamespace(data_file=f"set{number}.bin")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        assert 0 <= index < self.length
        return self.number, index

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        return [(index, 0, 1)]


def test_every_sample_of_a_member_is_seen_once_and_in_order():
    maps = build_blend([7, 2, 1], 1000)
    members = [_Numbers(d, n) for d, n in enumerate(samples_per_member([7, 2, 1], 1000))]
    dataset = BlendedDataset(members, maps)  # type: ignore[arg-type]
    assert len(dataset) == 1000
    samples = [dataset[i] for i in range(1000)]
    for d, count in enumerate([700, 200, 100]):
        assert [i for member, i in samples if member == d] == list(range(count))  # type: ignore[comparison-overlap]
    for index in (1000, -1):
        with pytest.raises(IndexError):
            dataset[index]
    assert [list(dataset.pieces(i)) for i in range(3)] == [[(member, i, 0, 1)] for member, i in samples[:3]]


def test_a_member_that_would_run_out_is_refused():
    """Upstream starts it again."""
    maps = build_blend([7, 3], 1000)
    with pytest.raises(DataError, match=r"set1\.bin: 299 samples, but the blend draws 300"):
        BlendedDataset([_Numbers(0, 700), _Numbers(1, 299)], maps)  # type: ignore[list-item]


def test_each_sample_once_by_weight():
    maps = room.OnePassKey((1, 2, 1), (10, 6, 1)).build()
    assert maps.drawn.tolist() == [10, 6, 1]
    for member, count in enumerate((10, 6, 1)):
        assert maps.dataset_sample_index[maps.dataset_index == member].tolist() == list(range(count))
    # While all last, as the weights say; then the first alone
    assert np.bincount(maps.dataset_index[:4]).tolist() == [1, 2, 1] and not maps.dataset_index[-6:].any()
