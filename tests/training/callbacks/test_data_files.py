"""Data files that change under a running run."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.data import DataError
from megatron.training import train
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, NEOX, begin, config, run_to_end

STEPS = 6


class Editor(Callback):
    """Does something to the data after step 3."""

    def __init__(self, data: Path, edit: str) -> None:
        self.data, self.edit = data, edit

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        if step.iteration != 3:
            return
        if self.edit == "touch":
            os.utime(self.data, ns=(1, 1))
        elif self.edit == "replace":
            self.data.with_suffix(".new").write_bytes(bytes(len(self.data.read_bytes())))
            self.data.with_suffix(".new").replace(self.data)
        else:
            with self.data.open("r+b") as file:
                file.seek(40)
                file.write(b"\1\2\3\4")


def run_with_edit(rank: int, world_size: int, values: dict[str, Any], data: Path, edit: str) -> str | None:
    try:
        train(begin(values), [Editor(data, edit)] if rank == 0 else [])
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return None


def values_of(folder: Path, **keys: Any) -> tuple[dict[str, Any], Path]:
    for suffix in (".bin", ".idx"):
        shutil.copy(GOLDEN / "dataset" / f"corpusA_text_document{suffix}", folder / f"text{suffix}")
    save = {"save": str(folder / "run"), "load": str(folder / "run"), "checkpoint_factor": 2}
    return config(NEOX, save, train_iters=STEPS, data_path=str(folder / "text"), **keys), folder / "text.bin"


def test_a_file_that_is_changed_in_place_ends_the_run_before_it_saves(tmp_path: Path) -> None:
    values, data = values_of(tmp_path)
    original = data.read_bytes()
    problems = run_ranks(run_with_edit, 2, values, data, "write")
    assert all(problem is not None and str(data) in problem and "step 2" in problem for problem in problems)
    assert (tmp_path / "run" / "latest").read_text() == "global_step2"
    data.write_bytes(original)
    run_ranks(run_to_end, 2, values)
    assert (tmp_path / "run" / "latest").read_text() == f"global_step{STEPS}"


def run_changed_while_it_starts(rank: int, world_size: int, values: dict[str, Any], data: Path, content: bytes) -> str:
    training = begin(values)
    with data.open("r+b") as file:
        file.write(content)
    with pytest.raises(DataError) as problem:
        train(training)
    return str(problem.value)


def run_changed_after_its_last_step(rank: int, world_size: int, values: dict[str, Any], data: Path) -> str:
    training, written = begin(values), data.read_bytes()[::-1]

    class Reader(Callback):
        """Changes the data after the last save, and reads them at the end, as the summary of a run does."""

        def close(self) -> None:
            with data.open("r+b") as file:
                file.write(written)
            raise DataError("an answer has no score")

    with pytest.raises(DataError) as problem:
        train(training, [Reader()])
    return str(problem.value)


def test_errors_of_the_end_name_a_change(tmp_path: Path) -> None:
    values, data = values_of(tmp_path)
    (problem,) = run_ranks(run_changed_after_its_last_step, 1, values, data)
    assert problem.startswith(str(data)) and f"step {STEPS}" in problem
    assert (tmp_path / "run" / "latest").read_text() == f"global_step{STEPS}"


@pytest.mark.parametrize("token", [2, 60000], ids=["another token", "a token beyond the vocabulary"])
def test_a_change_before_the_first_step_is_named(token: int, tmp_path: Path) -> None:
    values, data = values_of(tmp_path)
    content = token.to_bytes(2, "little") * (data.stat().st_size // 2)
    (problem,) = run_ranks(run_changed_while_it_starts, 1, values, data, content)
    assert problem.startswith(str(data)) and "allow_changed_data" in problem
    assert not (tmp_path / "run" / "latest").exists()


@pytest.mark.parametrize(("edit", "keys"), [("touch", {}), ("replace", {}), ("write", {"allow_changed_data": True})])
def test_other_changes_do_not(edit: str, keys: dict[str, Any], tmp_path: Path) -> None:
    values, data = values_of(tmp_path, **keys)
    assert run_ranks(run_with_edit, 1, values, data, edit) == [None]
    assert (tmp_path / "run" / "latest").read_text() == f"global_step{STEPS}"
