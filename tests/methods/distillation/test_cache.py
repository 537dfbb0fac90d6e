"""The teacher asked before the first step: the same losses as on the fly, kept by content, gone on with."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron.data import DataError
from megatron.launch import process_info
from megatron.methods.distillation import cache
from megatron.neox_arguments import NeoXArgs
from megatron.training import start
from tests.methods.distillation.runs import DOCUMENTS, LABELLED, LAYOUTS, student
from tests.pool import run_ranks
from tests.training.runs import assert_alike, begin, curves_of

TOP: dict[str, Any] = {"top_k": 8, "temperature": 1.5, "beta": 0.5, "weight": 0.8}
KINDS = {"documents": {**DOCUMENTS, "train_iters": 6}, "labelled": {**LABELLED, "train_iters": 6}}
KIND_OF = {"tp2 sp": "documents", "pp2": "labelled", "dp2": "labelled", "zero3": "documents"}


def cached(teacher: str, folder: Path, kind: str = "documents", **layout: Any) -> dict[str, Any]:
    return student(teacher, KINDS[kind], layout, **TOP, cache=True, cache_dir=str(folder))


@pytest.mark.more
def test_cached_equals_on_the_fly(teacher: str, tmp_path: Path) -> None:
    on_the_fly = curves_of({kind: student(teacher, keys, **TOP) for kind, keys in KINDS.items()}, 4)
    assert_alike(curves_of({kind: cached(teacher, tmp_path, kind) for kind in KINDS}, 4), on_the_fly, losses=1e-6)
    cached_runs = {name: cached(teacher, tmp_path / name, kind, **LAYOUTS[name]) for name, kind in KIND_OF.items()}
    assert_alike(curves_of(cached_runs, 4, ranks=2), {name: on_the_fly[kind] for name, kind in KIND_OF.items()})


def counts(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """For the pool: how many rows each start says that it scored and found; its steps ask no teacher."""
    with redirect_stdout(io.StringIO()) as output:
        for values in configs:
            training = start(NeoXArgs.from_dict(values), process_info())
            assert training.engine._fill_reference is None  # type: ignore[attr-defined]
            training.engine.close()
    return re.findall(r"distillation: teacher scored (\d+) rows, found (\d+)", output.getvalue())


def test_what_is_scored_is_found_by_any_run_that_asks_alike(teacher: str, tmp_path: Path) -> None:
    values = cached(teacher, tmp_path)
    other_temperature = {**values, "distillation": {**values["distillation"], "temperature": 1.0}}
    assert run_ranks(counts, 1, [values, other_temperature]) == [[("48", "0")] * 2]
    assert run_ranks(counts, 2, [{**values, "model_parallel_size": 2, "train_iters": 7}])[0] == [("8", "48")]


def interrupted_start(rank: int, world_size: int, values: dict[str, Any]) -> list[tuple[str, str]]:
    """For the pool: a start that ends after 16 rows are kept, and what the next one says."""
    add, calls = cache.add_scores, []

    def add_twice(*args: Any) -> None:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(add(*args))

    with mock.patch.object(cache, "_TOKENS_AT_ONCE", 8 * 32), mock.patch.object(cache, "add_scores", add_twice):
        with pytest.raises(KeyboardInterrupt):
            begin(values)
    return counts(rank, world_size, [values])


def test_an_interrupted_start_keeps_its_files(teacher: str, tmp_path: Path) -> None:
    assert run_ranks(interrupted_start, 1, cached(teacher, tmp_path)) == [[("32", "16")]]


def damaged(rank: int, world_size: int, values: dict[str, Any], folder: Path) -> None:
    """For the pool: a token of every file is another one than it was; then one file is cut."""
    begin(values).engine.close()
    for file in folder.glob("*/top-*.npy"):
        np.load(file, mmap_mode="r+")["ids"] += 1
    training = begin(values)
    with pytest.raises(DataError, match="top-.* damaged.* delete"):
        training.datasets.train[0]  # type: ignore[index]
    training.engine.close()
    rows = next(folder.glob("*/rows-*.npy"))
    rows.write_bytes(rows.read_bytes()[:-3])
    with pytest.raises(DataError, match="rows-.* damaged.* delete"):
        begin(values)


def test_damage_is_found(teacher: str, tmp_path: Path) -> None:
    run_ranks(damaged, 1, cached(teacher, tmp_path), tmp_path)
