"""Reads the data of a report from a run's folders: series of metrics, checkpoints, answers.

Of a model trained with rewards it reads the best and the worst answer of a few generations.
"""

import itertools
import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.neox_arguments import NeoXArgs, UserError
from megatron.operations.report.router_loads import RouterLoad, read_load
from megatron.operations.run_folder import RunFolder, RunFolderError, open_run
from megatron.process import run_files
from megatron.process.metrics_file import POSITION, ROLLOUTS_FILE, read_lines
from megatron.process.run_files import Problems, Unfit, fields_of, open_file, parse, read_fields, text

Numbers = NDArray[np.float64]
MAX_GENERATIONS = 6  # generations, the first and the last among them


@dataclass(frozen=True)
class Series:
    """One metric over a run: `[points]` each. tokens: consumed so far, NaN if a row does not say. values: may
    be NaN or infinite."""

    iterations: Numbers
    tokens: Numbers
    values: Numbers


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in `save`. manifest: its manifest.json, {} if missing or unreadable."""

    iteration: int
    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A prompt of `demo_prompts`, and the model's answers before and after training; None if not asked."""

    prompt: str
    before_training: str | None
    after_training: str | None


@dataclass(frozen=True)
class AnswerRow:
    """An answer with a reward, as the page shows it. rewards: text with the reward of each function."""

    prompt: str
    completion: str
    reward: float
    rewards: str


@dataclass(frozen=True)
class GenerationRows:
    """A generation of answers.

    iteration: of the first step that trains on them.
    mean: mean of all known rewards.
    answers: number of answers.
    best, worst: None if no answer has a reward.
    """

    iteration: int
    answers: int
    mean: float | None
    best: AnswerRow | None
    worst: AnswerRow | None


@dataclass(frozen=True)
class Run:
    """The data of one run for a report.

    rows: lines in its metrics.jsonl.
    args: None if no start has left its configuration.
    status, summary: status.json and training_summary.json, or {}.
    answers_at: iterations at which `demo_prompts` were answered, sorted.
    load: load of experts; None without experts.
    rollouts: answers of a run trained with rewards.
    problems: unusable content of its files.
    """

    name: str
    folder: RunFolder
    rows: int
    series: Mapping[str, Series]
    args: NeoXArgs | None
    status: Mapping[str, Any]
    summary: Mapping[str, Any]
    checkpoints: Sequence[Checkpoint]
    answers: Sequence[Answer]
    answers_at: tuple[int, ...]
    load: RouterLoad | None = None
    rollouts: Sequence[GenerationRows] = ()
    problems: Sequence[str] = ()


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs that paths name, each as for `open_run`. Raises RunFolderError for a path without a run,
    unreadable files, or a run that is named twice."""
    folders = [open_run(path) for path in paths]
    logs = [folder.logs.resolve() for folder in folders]
    for path, place in zip(paths, logs, strict=True):
        if logs.count(place) > 1:
            raise RunFolderError(f"{path}: this run is named twice (it logs into {place}); name each once")
    return [read_run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]


def read_run(folder: RunFolder, name: str, args: NeoXArgs | None = None) -> Run:
    """Reads the folders of a run. args: its configuration, if the caller knows it. Raises RunFolderError."""
    rows, problems = folder.rows(), folder.problems
    checkpoints = list(_checkpoints(folder.save, problems))
    answers, answers_at = _answers(folder.save, problems)
    status, summary = folder.status(), folder.summary()
    load, rollouts = read_load(folder.logs, problems), read_rollouts(folder.logs, problems)
    args = args or folder.args() or _saved_args(checkpoints, problems)
    return Run(
        name, folder, len(rows), series_of(rows), args, status, summary, checkpoints, answers, answers_at, load,
        rollouts, problems.lines(),
    )  # fmt: skip


def series_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """Returns a series for each metric with numbers in the rows of a metrics.jsonl, by name."""
    points: dict[str, array[float]] = {}  # iteration, tokens and value of each, one after another
    for row in rows:
        iteration, tokens = row["iteration"], row.get("consumed_tokens", math.nan)
        for name, value in row.items():
            if name not in POSITION and isinstance(value, int | float):
                points.setdefault(name, array("d")).extend((iteration, tokens, value))
    return {name: Series(*np.frombuffer(numbers).reshape(-1, 3).T) for name, numbers in points.items()}


def names_of(folders: Sequence[RunFolder]) -> list[str]:
    """Display names of runs: the last folders of `save`, as many as tell all runs apart. A run without `save`
    is named by its log folder."""
    places = [folder.save or (folder.logs.parent if folder.logs.name == "logs" else folder.logs) for folder in folders]
    names: list[str] = []
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(names):
            break
    return names


def _checkpoints(save: Path | None, problems: Problems) -> Iterator[Checkpoint]:
    """Yields checkpoints in order of their steps. They are read as text, since `megatron.checkpointing`
    imports torch."""
    folders = save.glob("global_step*") if save is not None else ()
    for folder in sorted(folders, key=lambda path: (len(path.name), path.name)):
        step = folder.name.removeprefix("global_step")
        if not re.fullmatch(r"[0-9]{1,18}", step) or not folder.is_dir():
            continue
        file = folder / "manifest.json"
        manifest = read_fields(file, run_files.MANIFEST_SHAPE, problems)

        def note(name: str, reason: str, file: Path = file) -> None:
            problems.note(file, f"data.{name}", reason)

        manifest["data"] = fields_of(manifest.get("data") or {}, run_files.DATA_SHAPE, note)
        yield Checkpoint(int(step), manifest)


def _saved_args(checkpoints: Sequence[Checkpoint], problems: Problems) -> NeoXArgs | None:
    """The configuration in the newest checkpoint that has one, without the origins of its keys."""
    for checkpoint in reversed(checkpoints):
        if config := checkpoint.manifest.get("config"):
            try:
                return NeoXArgs.from_dict(config)
            except (UserError, ValueError, KeyError, TypeError, AttributeError) as problem:
                reason = f"config: not readable by this version ({type(problem).__name__})"
                problems.note(Path(f"global_step{checkpoint.iteration}/manifest.json"), "", reason)
    return None


def _answers(save: Path | None, problems: Problems) -> tuple[list[Answer], tuple[int, ...]]:
    """Returns (answers in `demo_outputs` before the first step and of the newest file, all iterations)."""
    files: dict[int, Path] = {}
    for path in (save / "demo_outputs").glob("step*.jsonl") if save is not None else ():
        if re.fullmatch(r"[0-9]{1,18}", step := path.stem.removeprefix("step")):
            files[int(step)] = path
    if not files:
        return [], ()
    initial = _lines(files[0], problems) if 0 in files else {}
    final = _lines(files[max(files)], problems) if max(files) else {}
    prompts = list(dict.fromkeys([*initial, *final]))
    return [Answer(prompt, initial.get(prompt), final.get(prompt)) for prompt in prompts], tuple(sorted(files))


def _lines(path: Path, problems: Problems) -> dict[str, str]:
    """Reads a file of `demo_outputs`: answers by prompt. Lines without an answer are noted in `problems`."""
    answers = {}
    try:
        with open_file(path) as file:
            for line in file:
                try:
                    row = parse(line)
                    answers[_prompt(row)] = text(row["answer"])
                except (ValueError, KeyError, TypeError, Unfit) as problem:
                    problems.note(path, "", f"a line is not an answer ({type(problem).__name__}: {problem}); skipped")
    except OSError as problem:
        problems.note(path, "", f"cannot be read ({problem.strerror})")
    return answers


def _prompt(line: Mapping[str, Any]) -> str:
    """The text of a prompt; a conversation as lines of `role: content`."""
    if "messages" in line:
        return text("\n".join(f"{message['role']}: {message['content']}" for message in line["messages"]))
    return text(line["prompt"])


def _message_text(value: Any) -> str:
    """Returns a text unchanged; messages become one text, with a line `role: content` for each."""
    if not isinstance(value, list):
        return text(value)
    if not all(isinstance(message, dict) for message in value):
        raise Unfit("a text or messages")
    return text("\n".join(f"{message.get('role')}: {message.get('content')}" for message in value))


_SHAPE: run_files.Shape = {
    "iteration": run_files.count, "generation": run_files.any_value,
    "reward": run_files.number, "rewards": run_files.map_of(run_files.number),
    "prompt": _message_text, "completion": _message_text, "messages": _message_text,
}  # fmt: skip


def read_rollouts(logs: Path, problems: Problems) -> list[GenerationRows]:
    """Returns at most MAX_GENERATIONS generations of a run, evenly spaced, from the rollouts file in `logs`.

    Without the file it returns []. problems: notes unusable lines."""
    path = logs / ROLLOUTS_FILE
    lines = (row for _, row in read_lines(path, problems)) if path.is_file() else iter(())
    rows = (fields_of(row, _SHAPE, lambda name, reason: problems.note(path, name, reason)) for row in lines)
    groups = itertools.groupby(rows, key=lambda row: (row["iteration"], row.get("generation")))
    generations = [_generation(list(answers)) for _, answers in groups]
    chosen = np.linspace(0, len(generations) - 1, min(len(generations), MAX_GENERATIONS))
    return [generations[index] for index in chosen.round().astype(int)]


def _generation(rows: Sequence[dict[str, Any]]) -> GenerationRows:
    judged = [row for row in rows if row.get("reward") is not None]
    mean = sum(row["reward"] for row in judged) / len(judged) if judged else None
    best, worst = ((_answer(pick(judged, key=lambda row: row["reward"])) if judged else None) for pick in (max, min))
    return GenerationRows(rows[0]["iteration"], len(rows), mean, best, worst)


def _answer(row: dict[str, Any]) -> AnswerRow:
    parts = row.get("rewards") or {}
    words = [f"{name} {'none' if math.isnan(value) else f'{value:g}'}" for name, value in parts.items()]
    written = row.get("messages") or row.get("completion") or ""
    return AnswerRow(row.get("prompt") or "", written, row["reward"], ", ".join(words))
