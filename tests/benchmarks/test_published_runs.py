"""Published throughputs: every row is complete, and none can tune a planner and test it too."""

from typing import Any

import pytest

from benchmarks import published_runs as runs
from benchmarks.published_runs import framework_of, planned_args_of, read_frameworks, read_rows, tflops
from megatron.launch.gpus import read_gpus
from megatron.planning.fake_cuda import shim
from megatron.planning.machines import read_links, read_reached
from megatron.planning.processes import Processes

needs_compiler = pytest.mark.skipif(shim.lacking() is not None, reason=f"left out: {shim.lacking()}")


@pytest.mark.parametrize("name", ["a", "b"])
def test_rows_are_complete(name: str) -> None:
    rows, gpus = read_rows(name), read_gpus()
    assert len(rows) > 80 and len({row["framework"] for row in rows}) >= 8 and len({row["gpu"] for row in rows}) >= 5
    for row in rows:
        peak = gpus[row["gpu"]].fp8 if row["precision"] == "fp8" else gpus[row["gpu"]].bf16
        assert 0.01 < tflops(row) / peak < 1 and row["source"].startswith(("https://", "docs/")), row


def test_lists_share_no_run() -> None:
    runs = [{(row["framework"], row["model"], row["gpu"], row["gpus"]) for row in read_rows(name)} for name in "ab"]
    assert not runs[0] & runs[1]


def test_flops_of_llama_3_8b() -> None:
    """6 FLOPs a parameter that a token meets, and attention's half square (torchtitan counts all of it)."""
    row = next(row for row in read_rows("b") if row["model"] == "Llama-3-8B" and row["tokens_per_s"] == 8290)
    parameters = 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336) + 128256 * 4096
    per_token = 6 * parameters + 32 * 6 * 4096 * row["seq_length"]
    assert tflops(row) == pytest.approx(8290 * per_token / 1e12, rel=1e-3)


def errors_of(rows: list[dict[str, Any]]) -> list[float]:
    """Predicted tokens per second beside published ones; prints each."""
    frameworks, links = read_frameworks(), read_links()
    reached = {name: read_reached(name) for name in runs.GENERATIONS}
    errors = []
    with Processes(2) as processes:
        traces = runs.traces(rows, processes)
    for row, trace in zip(rows, traces, strict=True):
        framework = framework_of(row, frameworks)
        machine = runs.machine_of(row, framework, reached, links)
        rate = runs.tokens_per_second(row, runs.model_of(row, trace, framework, machine))
        errors.append(rate / row["tokens_per_s"] - 1)
        print(f"{row['framework']}, {row['model']}, {row['gpus']} {row['gpu']}, {row['precision']}: {errors[-1]:+.1%}")
    return errors


@pytest.mark.more
@needs_compiler
def test_predictions_of_some_rows() -> None:
    """This project's own bf16 steps, and one of a pipeline with virtual stages."""
    rows = [row for row in read_rows("a") if row["framework"] == "this project" and row["precision"] == "bf16"]
    rows += [row for row in read_rows("b") if row["model"] == "Llama-3.1-405B" and row["tokens_per_s"] == 206.1]
    assert len(rows) == 4 and max(map(abs, errors_of(rows))) < 0.1


@pytest.mark.product
@needs_compiler
def test_predictions_of_list_b() -> None:
    errors = sorted(map(abs, errors_of(read_rows("b"))))
    assert errors[len(errors) // 2] < 0.11 and sum(errors) / len(errors) < 0.18


def test_layouts_of_rows() -> None:
    """Every row can be planned; its data ranks are those of its GPUs."""
    frameworks = read_frameworks()
    for row in [*read_rows("a"), *read_rows("b")][::10]:
        args = planned_args_of(row, framework_of(row, frameworks))
        product = row["model_parallel_size"] * row.get("pipe_parallel_size", 1) * row.get("context_parallel_size", 1)
        assert args.data_parallel_size * product == row["gpus"] and args.zero_stage == row.get("zero", args.zero_stage)
