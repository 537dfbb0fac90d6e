"""The cache of index maps: one file a set, whole or not there, and never believed when it was damaged."""

import json
import logging
import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.data import DataError, build_blend, build_packed
from megatron.data.blending import BlendedDataset, BlendKey, BlendMaps
from megatron.data.index_cache import TAIL, ensure_cached, load_cached
from megatron.data.index_maps import IndexKey, IndexMaps, Packing
from tests.data.samples import assert_equal_maps, refused, write_dataset
from tests.data.test_text_sets import build, make_blend

KEY = IndexKey("0" * 64, first=0, last=9, num_samples=10, seq_length=8, seed=1, packing=Packing())
BLEND = BlendKey((1.0, 2.0), 20)


def _maps() -> IndexMaps:
    return build_packed(np.full(9, 20, np.int32), 0, 9, 10, 8, 1)


BUILDERS = {KEY: _maps, BLEND: lambda: build_blend((1.0, 2.0), 20)}


def _file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_it_is_written_once_whole_and_mapped(tmp_path: Path):
    calls = []
    counting_builders = {key: lambda make=make: calls.append(1) or make() for key, make in BUILDERS.items()}
    for _ in range(3):
        ensure_cached(tmp_path / "cache", counting_builders)
    assert len(calls) == 2
    entry = load_cached(tmp_path / "cache", BUILDERS, wait=0)
    maps = entry.maps(KEY, IndexMaps)
    assert not maps.sample_idx.flags.owndata and not maps.sample_idx.flags.writeable
    assert all(array.ctypes.data % 64 == 0 for array in vars(maps).values())
    assert_equal_maps(maps, _maps())
    assert_equal_maps(entry.maps(BLEND, BlendMaps), BUILDERS[BLEND]())
    content = _file(tmp_path / "cache").read_bytes()
    length, _ = TAIL.unpack(content[-TAIL.size :])
    assert json.loads(content[-TAIL.size - length : -TAIL.size])["keys"][0]["num_samples"] == 10


def test_an_interrupted_build_leaves_nothing(tmp_path: Path):
    def make() -> IndexMaps:
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="No space left on device.*set index_cache_dir"):
        ensure_cached(tmp_path, {BLEND: BUILDERS[BLEND], KEY: make})
    assert not list(tmp_path.iterdir())


def test_two_builders_of_the_same_maps_do_not_disturb_each_other(tmp_path: Path):
    def make_while_another_finishes() -> IndexMaps:
        process = multiprocessing.get_context("fork").Process(target=ensure_cached, args=(tmp_path, {KEY: _maps}))
        process.start()
        process.join()
        mapped.append(load_cached(tmp_path, [KEY], wait=0).maps(KEY, IndexMaps))
        return _maps()

    mapped: list[IndexMaps] = []
    ensure_cached(tmp_path, {KEY: make_while_another_finishes})
    assert_equal_maps(mapped[0], _maps())
    assert_equal_maps(load_cached(tmp_path, [KEY], wait=0).maps(KEY, IndexMaps), _maps())
    assert _file(tmp_path).suffix == ".maps"


def test_other_ranks_wait_for_the_file(tmp_path: Path):
    writer = threading.Timer(0.3, ensure_cached, (tmp_path, BUILDERS))
    writer.start()
    assert len(load_cached(tmp_path, BUILDERS, wait=100).maps(KEY, IndexMaps).shuffle_idx) == len(_maps().shuffle_idx)
    writer.join()
    refused("index_cache_dir.*node", load_cached, tmp_path, [replace(KEY, seed=3)], wait=0)


def _array(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[bytes], bytes]:
    """The damage that puts another array, of the same size, in the place of one of the maps."""

    def damaged(content: bytes) -> bytes:
        array: np.ndarray = getattr(_maps(), name)
        assert content.count(array.tobytes()) == 1
        return content.replace(array.tobytes(), change(array).astype(array.dtype).tobytes())

    return damaged


DAMAGE = {
    "shuffle_idx reversed": _array("shuffle_idx", lambda array: array[::-1]),
    "doc_idx reversed": _array("doc_idx", lambda array: array[::-1]),
    "doc_idx out of range": _array("doc_idx", lambda array: array + 1_000_000),
    "sample_idx out of range": _array("sample_idx", lambda array: -array - 1),
    "shuffle_idx zeroed": _array("shuffle_idx", np.zeros_like),
    "one bit": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "zeroed": lambda content: bytes(len(content)),
    "empty": lambda content: b"",
    "few bytes": lambda content: content[:5],
    "cut off": lambda content: content[:-4],
    "half": lambda content: content[: len(content) // 2],
    "first half lost": lambda content: content[len(content) // 2 :],
    "a type in the description": lambda content: content.replace(b'"<i4"', b'"<u4"'),
    "longer": lambda content: content + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_said_and_made_again(damage: Callable[[bytes], bytes], tmp_path: Path, caplog):
    ensure_cached(tmp_path, BUILDERS)
    intact = _file(tmp_path).read_bytes()
    _file(tmp_path).write_bytes(damage(intact))
    assert _file(tmp_path).read_bytes() != intact
    with caplog.at_level(logging.WARNING, "megatron"):
        ensure_cached(tmp_path, BUILDERS)
    (warning,) = caplog.messages
    assert warning.startswith(f"{_file(tmp_path)}: damaged (") and "\n" not in warning
    assert _file(tmp_path).read_bytes() == intact


def test_the_file_of_other_maps_is_not_used(tmp_path: Path, caplog):
    ensure_cached(tmp_path / "a", BUILDERS)
    ensure_cached(tmp_path / "b", {KEY: _maps})
    file = _file(tmp_path / "a")
    expected = file.read_bytes()
    file.write_bytes(_file(tmp_path / "b").read_bytes())
    refused(r"damaged.*maps of other data.*delete", load_cached, tmp_path / "a", BUILDERS, wait=0)
    with caplog.at_level(logging.WARNING, "megatron"):
        ensure_cached(tmp_path / "a", BUILDERS)
    assert "maps of other data" in caplog.text and file.read_bytes() == expected
    file.write_bytes(expected[:-4])
    refused(r"\.maps: damaged.*delete", load_cached, tmp_path / "a", BUILDERS, wait=0)  # by a rank that only maps, too


def test_a_blend_of_many_sets_maps_each_file_once(tmp_path: Path):
    """Each set has two files; a start with all maps in the cache maps these, and one file of all maps."""

    def mapped() -> int:
        """How many maps of the folder this process has."""
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    paths = tuple(write_dataset(tmp_path / f"s{i}", [40] * 5, seed=i).prefix for i in range(40))
    args = make_blend(tmp_path, train_data_paths=paths, train_data_weights=None, train_iters=20)
    first_run = build(args).train
    num_mapped = mapped()
    second_run = build(args).train
    assert isinstance(first_run, BlendedDataset) and isinstance(second_run, BlendedDataset)
    assert mapped() - num_mapped <= 2 * len(paths) + 1
    assert len(list((tmp_path / "cache").iterdir())) == 1
    for i in (0, 77, len(first_run) - 1):
        np.testing.assert_array_equal(first_run[i].tokens, second_run[i].tokens)
