"""Files of a run with values that no run of ours writes: readers go on, and name what they left out."""

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.operations.jobs.local_runs import local_run
from megatron.operations.jobs.overview import Choice, Row, overview, row_of
from megatron.operations.jobs.scheduler import Slurm
from megatron.operations.jobs.table import console, render
from megatron.operations.memory_parts import read_memory, table
from megatron.operations.report import write_report
from megatron.operations.report.curves import plots_of
from megatron.operations.report.events import events_of
from megatron.operations.report.facts import data_facts, model_facts, scores_of, summary_facts
from megatron.operations.report.router_loads import maps_of
from megatron.operations.report.run_data import Run, read_runs
from megatron.operations.run_folder import RunFolderError
from megatron.pipelines.measurements import MissingError, read_measurements
from megatron.process.run_files import (
    DATA_SHAPE,
    MANIFEST_SHAPE,
    ROW_SHAPE,
    STATUS_SHAPE,
    SUMMARY_SHAPE,
    Problems,
    read_status,
)

# As they stand in a file: some are no JSON that Python itself would write.
ODD = (
    '"x"', '""', '"\\ud800"', '"\\u0000\\u001b[31m"', f'"{"a" * 100_000}"', "1e300", "-1", "0.5", "1e999", "-1e999",
    "NaN", "true", "null", str(2**63), "9" * 400, "[]", "[1, 2]", '[["x"]]', "{}", '{"a": {"b": []}}',
    "[" * 5000 + "]" * 5000, "9" * 5000, '{"total": "many", "trainable": 1, "trainable_share": null}',
)  # fmt: skip
METRICS = ("train/lm_loss", "eval_tasks/a_acc", "runtime/tokens_per_sec", "runtime/model_flops_utilization")
NAMES = {
    "status.json": tuple(STATUS_SHAPE), "training_summary.json": tuple(SUMMARY_SHAPE),
    "global_step2/manifest.json": (*MANIFEST_SHAPE, *DATA_SHAPE), "logs/metrics.jsonl": (*ROW_SHAPE, *METRICS),
    "logs/rollouts.jsonl": ("iteration", "prompt", "completion", "messages", "reward", "rewards", "generation"),
    "logs/router_load.jsonl": ("iteration", "layers", "load"),
    "demo_outputs/step2.jsonl": ("prompt", "answer", "messages"),
    "logs/neox_args.train.1.json": ("given", "origins", "config_files", "world_size"),
    "logs/memory_parts.json": ("iteration", "device", "compile", "ranks", "timeline"),
}  # fmt: skip


def write_run(save: Path) -> Path:
    """A run after two steps, with every file that is read of runs."""
    for folder in ("logs", "global_step2", "demo_outputs"):
        (save / folder).mkdir(parents=True)
    row = {"iteration": 1, "train/lm_loss": 2.0, "runtime/tokens_per_sec": 10.0, "runtime/iteration_time": 0.5}
    good = {
        "status.json": {"status": "finished", "iteration": 2, "train_iters": 4, "host": socket.gethostname()},
        "training_summary.json": {"training_seconds": 3.0}, "global_step2/manifest.json": {"engine": "native"},
        "logs/metrics.jsonl": row, "logs/rollouts.jsonl": {"iteration": 1, "prompt": "a", "reward": 1.0},
        "logs/router_load.jsonl": {"iteration": 1, "layers": [2], "load": [[1.0, 1.0]]},
        "demo_outputs/step2.jsonl": {"prompt": "a", "answer": "b"},
    }  # fmt: skip
    for name, content in good.items():
        (save / name).write_text(json.dumps(content) + "\n")
    return save


def put(save: Path, name: str, values: dict[str, str]) -> None:
    """Let a file, or in one of lines two, hold these values; what stands there is JSON as text."""
    if name.endswith(".jsonl"):
        values = {"iteration": "2", **values}
    line = "{" + ", ".join(f'"{key}": {value}' for key, value in values.items()) + "}\n"
    if name == "logs/metrics.jsonl" and values["iteration"] == "2":
        line = '{"iteration": 1, "train/lm_loss": 3.0}\n' + line
    (save / name).write_text(line)


def look(save: Path) -> tuple[Row, Run]:
    """Does what jobs.py and report.py do with a run, but for drawing it."""
    row = row_of(local_run(save), {})
    with open(os.devnull, "w", encoding="utf-8") as file:
        console(file).print(render([row], narrow=False))
    json.dumps(row.as_dict(), allow_nan=False).encode()
    (run,) = read_runs([save])
    facts = [*summary_facts(run), *model_facts(run), *data_facts(run)]
    "\n".join([*map(str, facts), *map(str, events_of(run)), *map(str, run.rollouts), *run.problems]).encode()
    plots_of([run]), maps_of([run.load]), scores_of(run)
    return row, run


def read_memory_parts(save: Path) -> None:
    with pytest.raises(RunFolderError, match=r"memory_parts\.json"):
        table(read_memory(save / "logs" / "memory_parts.json"))


def measure_gates(save: Path) -> None:
    measured = read_measurements(save / "logs")
    for name in measured.names():
        with suppress(MissingError):  # the newest row is without it
            measured.measure(name)
    with pytest.raises(MissingError):
        measured.measure("train/none")


@pytest.mark.parametrize("name", NAMES)
def test_no_odd_value_of_a_file_stops_its_readers(tmp_path: Path, name: str) -> None:
    save = write_run(tmp_path / "run")
    for value in ODD:
        odd = dict.fromkeys(NAMES[name], value)
        put(save, name, odd)
        look(save)
        if name.endswith(".jsonl"):  # with an iteration, so that the line counts as a row
            put(save, name, {**odd, "iteration": "2"})
            look(save)
        elif name == "global_step2/manifest.json":
            data = "{" + ", ".join(f'"{key}": {value}' for key in DATA_SHAPE) + "}"
            put(save, name, {"data": data})
            look(save)
        (read_memory_parts if name == "logs/memory_parts.json" else measure_gates)(save)


def test_what_was_left_out_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    save = write_run(tmp_path / "run")
    put(save, "status.json", {"status": '"finished"', "train_iters": '"x"', "iteration": "2", "pid": "-1"})
    put(save, "training_summary.json", {"training_seconds": "1e300", "world_size": "4"})
    odd = {"train/lm_loss": "2.5", "runtime/tokens_per_sec": '"fast"', "eval_tasks/a_acc": '{"b": 1}'}
    put(save, "logs/metrics.jsonl", odd)
    rank = '[{"rank": 0, "peak": 1, "parts": 7}]'
    put(
        save,
        "logs/memory_parts.json",
        {"iteration": "1", "device": '"a"', "compile": "{}", "ranks": rank, "timeline": "{}"},
    )
    with pytest.raises(RunFolderError, match='whose "parts" is an object'):
        read_memory(save / "logs" / "memory_parts.json")
    row, run = look(save)
    for reported_problems in (row.problems, run.problems):
        for file, name in (("status.json", 'train_iters: "x"'), ("status.json", "pid: -1"),
                           ("metrics.jsonl", 'runtime/tokens_per_sec: "fast"'),
                           ("metrics.jsonl", "eval_tasks/a_acc: an object")):  # fmt: skip
            assert any(f"/{file}: {name}" in line for line in reported_problems), (name, reported_problems)
    assert any("training_summary.json: training_seconds: 1e+300" in line for line in run.problems)
    assert ("world size", "4") in summary_facts(run) and run.series["train/lm_loss"].values.tolist() == [3.0, 2.5]
    page = write_report([save]).read_text()
    assert "training_seconds" in page and "tokens_per_sec" in page, "named on the page too"


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text(file.read_text()[:20]),
        lambda file: file.write_bytes(b"\xff\xfe\0\1"),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_text("[1]\n"),
        lambda file: file.write_text("[" * 100_000),
        lambda file: (file.unlink(), os.mkfifo(file)),
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["half", "bytes", "empty", "list", "deep", "pipe", "folder"],
)
def test_a_damaged_file_hides_no_run(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    no_slurm = Slurm({}, lambda text: None, {"PATH": ""})
    for name in NAMES:
        save = write_run(tmp_path / name.replace("/", "-") / "run")
        (save / name).touch()
        damage(save / name)
        row, _ = look(save)
        overview_rows = overview(Choice(), no_slurm, {"NEOX_CHECKPOINT_DIR": str(save.parent)})
        assert [overview_row.job.name for overview_row in overview_rows] == ["run"], name
        if name == "status.json":
            assert row.verdict.kind == "UNKNOWN" and row.needs_a_person
            assert any("status.json: cannot be read" in line for line in row.problems)


def test_a_silent_sacct_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, command in (("sacct", "sleep 1000 & wait"), ("scontrol", "exit 0"), ("squeue", "exit 0")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    messages: list[str] = []
    slurm = Slurm({}, messages.append, {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}, answers_s=0.5)
    assert slurm.jobs() == [] and "sacct: does not answer within 0.5 s" in messages[0] and len(messages) == 1


def test_a_log_with_numbers_of_any_size(tmp_path: Path) -> None:
    save = write_run(tmp_path / "run")
    for line in (
        f"iteration {'9' * 5000}/ 4 | lm_loss: 1", f"iteration 1/ {'9' * 400} | lm_loss: 1",
        "iteration 1/ 4 | elapsed time per iteration (ms): 1.2.3 | lm_loss: x",
        f"iteration 1/ 4 | elapsed time per iteration (ms): {'9' * 400} | lm_loss: 1e999", "error: \x1b[2J\x00",
    ):  # fmt: skip
        (save / "logs" / "rank_0.log").write_text(f"{line}\n")
        look(save)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
).map(lambda value: json.dumps(value, ensure_ascii=True))


@pytest.mark.product
def test_values_at_random(tmp_path_factory: pytest.TempPathFactory) -> None:
    save = write_run(tmp_path_factory.mktemp("odd") / "run")

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def any_values(data: st.DataObject) -> None:
        for name, keys in NAMES.items():
            put(save, name, {key: data.draw(_VALUES) for key in keys if data.draw(st.booleans())})
        look(save)
        measure_gates(save)

    any_values()


def test_the_launcher_reads_a_half_written_status_as_none(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"status": "stop')
    problems = Problems()
    assert read_status(tmp_path, problems) == {} and "status.json: cannot be read" in problems.lines()[0]
