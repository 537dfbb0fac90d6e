"""`on_out_of_memory: split`: a step that ran out of memory is taken again in smaller micro-batches."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.data import Batch
from megatron.neox_arguments import ConfigError
from megatron.training import train
from megatron.training.out_of_memory import OutOfMemoryError
from tests.launch.runs import DEEPY, PIPED_OUTPUT, ROOT, environment
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, NEOX, begin, cells, config, metric_rows

FULL_STEP, LAST = 3, 5


def values_of(folder: Path, *parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    small = {"num_layers": 2, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "train_iters": LAST}
    save = {"save": str(folder), "checkpoint_factor": 2, "async_save": False, "on_out_of_memory": "split"}
    return config(NEOX, ADAMW, small, save, *parts, **overrides)


def run_with_little_memory(
    rank: int, world_size: int, values: dict[str, Any], rows: int
) -> tuple[str | None, int, list[list[int]]]:
    """For the pool: (message, exit code, rows of each step's micro-batches) of a start.

    In step FULL_STEP each rank has no memory for micro-batches of more than `rows` rows."""
    training, sizes = begin(values), []
    train_step = training.engine.train_step

    def step(batches: list[Batch], *args: Any) -> Any:
        sizes.append([len(batch.tokens) for batch in batches])
        if training.iteration + 1 == FULL_STEP and max(sizes[-1]) > rows:
            raise torch.OutOfMemoryError("Tried to allocate 2.50 GiB.")
        return train_step(batches, *args)

    training.engine.train_step = step  # type: ignore[method-assign]
    try:
        train(training)
    except OutOfMemoryError as problem:
        return str(problem), problem.exit_code, sizes
    return None, 0, sizes


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "dp2 ZeRO 1": (2, {"zero_optimization": {"stage": 1}}),
    "tp2 dp2 ZeRO 3": (4, {"model_parallel_size": 2, "zero_optimization": {"stage": 3}}),
    "pp2": (2, {"pipe_parallel_size": 2, "gradient_accumulation_steps": 2}),
    "cp2": (2, {**LLAMA, "context_parallel_size": 2}),
}


@pytest.mark.parametrize("layout", cells(["one rank", "dp2 ZeRO 1", "pp2"], ["tp2 dp2 ZeRO 3", "cp2"]))
def test_the_next_start_splits_the_step(layout: str, tmp_path: Path) -> None:
    ranks, keys = LAYOUTS[layout]
    values = values_of(tmp_path / "run", keys)
    message, code, _ = run_ranks(run_with_little_memory, ranks, values, 2)[0]
    assert message is not None and code == 75 and f"step {FULL_STEP}" in message
    _, code, sizes = run_ranks(run_with_little_memory, ranks, values, 2)[0]
    ordinary = sizes[-1]
    assert code == 0 and sizes == [[2] * (2 * len(ordinary)), ordinary, ordinary] and set(ordinary) == {4}
    undisturbed = values_of(tmp_path / "undisturbed", keys)
    run_ranks(run_with_little_memory, ranks, undisturbed, 4)
    rows, expected = (metric_rows(tmp_path / name) for name in ("run", "undisturbed"))
    for key in ("train/lm_loss", "train/grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=2e-6)
    assert [row["runtime/split_steps"] for row in rows] == [0, 0, 1, 1, 1]


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    values = values_of(tmp_path, checkpoint_factor=100)
    runs = [run_ranks(run_with_little_memory, 1, values, 2)[0] for _ in range(2)]
    assert [code for _, code, _ in runs] == [75, 0] and runs[1][2][FULL_STEP - 1] == [2] * 4


def test_a_second_lack_of_memory_ends_the_run(tmp_path: Path) -> None:
    values = values_of(tmp_path)
    codes = [run_ranks(run_with_little_memory, 1, values, 1)[0][1] for _ in range(2)]
    assert codes == [75, 1]


@pytest.mark.parametrize("change", [{"on_out_of_memory": "stop"}, {"train_micro_batch_size_per_gpu": 1}], ids=str)
def test_without_a_split_the_run_ends(change: dict[str, Any], tmp_path: Path) -> None:
    assert run_ranks(run_with_little_memory, 1, values_of(tmp_path, **change), 0)[0][1] == 1
    assert not (tmp_path / "split_steps.json").exists()


def test_an_odd_number_of_rows_is_split_into_single_rows(tmp_path: Path) -> None:
    values = values_of(tmp_path, train_batch_size=6, train_micro_batch_size_per_gpu=3)
    runs = [run_ranks(run_with_little_memory, 1, values, 2)[0] for _ in range(2)]
    assert [code for _, code, _ in runs] == [75, 0] and runs[1][2][0] == [1] * 6


@pytest.mark.parametrize("content", ["{", '{"run_id": 1, "steps": "3"}', '{"run_id": "another", "steps": [3]}'])
def test_a_damaged_file_splits_nothing(content: str, tmp_path: Path) -> None:
    values = values_of(tmp_path)
    run_ranks(run_with_little_memory, 1, values, 2)
    (tmp_path / "split_steps.json").write_text(content)
    _, code, sizes = run_ranks(run_with_little_memory, 1, values, 4)[0]
    assert code == 0 and sizes[0] == [4, 4]


REFUSED: dict[str, dict[str, Any]] = {
    "no save": {"save": None},
    "deepspeed": {"engine": "deepspeed"},
    "unlearning": {"ga_dataset": "b", "ga_interval": 2, "ga_iters": 1},
    "rotated answers": {"train_impl": "kto", "pack_impl": "unpacked", "kto_kl": "rotated"},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_refusals(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_out_of_memory"):
        begin(values_of(tmp_path, **change))


CALLBACK = """
import torch
from megatron.callbacks import Callback

class LittleMemory(Callback):
    def on_step_start(self, run, batches):
        if run.iteration + 1 == 3 and len(batches[0].tokens) > 2 and run.groups.world_rank == 1:
            raise torch.OutOfMemoryError("Tried to allocate 2.50 GiB.")
"""


@pytest.mark.more
def test_deepy_restarts_the_run(tmp_path: Path) -> None:
    (tmp_path / "little.py").write_text(CALLBACK)
    keys = {"callbacks": [f"{tmp_path}/little.py:LittleMemory"], "max_restarts": 1}
    (tmp_path / "run.yml").write_text(yaml.safe_dump(values_of(tmp_path / "run", **keys)))
    command = [*DEEPY, "--num_gpus", "2", str(ROOT / "train.py"), str(tmp_path / "run.yml")]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), timeout=300, **PIPED_OUTPUT)
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "run" / "split_steps.json").read_text())["steps"] == [FULL_STEP]
