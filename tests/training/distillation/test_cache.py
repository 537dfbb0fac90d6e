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
from megatron.neox_arguments import NeoXArgs
from megatron.training import start
from megatron.training.distillation import cache
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.distillation.runs import LABELLED, student
from tests.training.runs import begin, curves

TOP: dict[str, Any] = {"top_k": 8, "temperature": 1.5, "beta": 0.5, "weight": 0.8}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "tp2": (2, {"model_parallel_size": 2}),
    "pp2": (2, {"pipe_parallel_size": 2}),
    "dp2": (2, {"num_workers": 1}),
    "zero3": (2, {"zero_optimization": {"stage": 3}}),
}
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True, "train_iters": 6}
KINDS = {"documents": DOCUMENTS, "labelled": {**LABELLED, "train_iters": 6}}


def first_lines(rank: int, world_size: int, values: dict[str, Any]) -> str:
    """For the pool: what a run says before its first step, without asking a teacher in its steps."""
    with redirect_stdout(io.StringIO()) as output:
        training = start(NeoXArgs.from_dict(values), process_info())
    assert training.engine._fill_reference is None  # type: ignore[attr-defined]
    training.engine.close()
    return output.getvalue()


def cached(teacher: str, folder: Path, *parts: dict[str, Any]) -> dict[str, Any]:
    return student(teacher, *parts, **TOP, cache=True, cache_dir=str(folder))


def counts(text: str) -> tuple[int, int]:
    found = re.search(r"distillation: (\d+) rows scored, (\d+) found", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("layout", with_more(LAYOUTS, "tp2", "pp2", "zero3", product=["dp2"]))
def test_cached_equals_on_the_fly(layout: str, teacher: str, tmp_path: Path) -> None:
    ranks, keys = LAYOUTS[layout]
    runs = [student(teacher, kind, keys, **TOP) for kind in KINDS.values()]
    runs += [cached(teacher, tmp_path, kind, keys) for kind in KINDS.values()]
    parts = run_ranks(curves, ranks, runs, 6)[0]
    for on_the_fly, kept in zip(parts[:2], parts[2:], strict=True):
        assert kept.losses == pytest.approx(on_the_fly.losses, rel=1e-6) and kept.losses[-1] < kept.losses[0]
        assert kept.norms == pytest.approx(on_the_fly.norms, rel=1e-5)


def test_what_is_scored_is_found_by_any_run_that_asks_alike(teacher: str, tmp_path: Path) -> None:
    values = cached(teacher, tmp_path, DOCUMENTS)
    rows, none = counts(run_ranks(first_lines, 1, values)[0])
    assert rows == 48 and none == 0
    again = run_ranks(first_lines, 2, {**values, "model_parallel_size": 2, "train_iters": 7})[0]
    assert counts(again) == (8, 48)
    other = {**values, "distillation": {**values["distillation"], "temperature": 1.0}}
    assert counts(run_ranks(first_lines, 1, other)[0]) == (48, 0)


def cut_off(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: a start that ends after 16 rows are kept."""
    add, calls = cache.add_scores, []

    def add_twice(*args: Any) -> None:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(add(*args))

    with mock.patch.object(cache, "_TOKENS_AT_ONCE", 8 * 32), mock.patch.object(cache, "add_scores", add_twice):
        with pytest.raises(KeyboardInterrupt):
            begin(values)


def test_a_start_that_is_cut_off_keeps_what_it_has(teacher: str, tmp_path: Path) -> None:
    values = cached(teacher, tmp_path, DOCUMENTS)
    run_ranks(cut_off, 1, values)
    assert counts(run_ranks(first_lines, 1, values)[0]) == (32, 16)


def damaged(rank: int, world_size: int, values: dict[str, Any], folder: Path) -> None:
    """For the pool: a token of every file is another one than it was; then one file is cut."""
    for file in folder.glob("*/top-*.npy"):
        tokens = np.load(file, mmap_mode="r+")
        tokens["ids"] += 1
    training = begin(values)
    with pytest.raises(DataError, match="top-.* damaged; delete it"):
        training.datasets.train[0]  # type: ignore[index]
    training.engine.close()
    rows = next(folder.glob("*/rows-*.npy"))
    rows.write_bytes(rows.read_bytes()[:-3])
    with pytest.raises(DataError, match="rows-.* damaged .*delete it"):
        begin(values)


def test_damage_is_found(teacher: str, tmp_path: Path) -> None:
    values = cached(teacher, tmp_path, DOCUMENTS)
    run_ranks(first_lines, 1, values)
    run_ranks(damaged, 1, values, tmp_path)
