"""Reads the data for a report from a run's folders: metrics, checkpoints, answers to `demo_prompts`.

For a model trained with rewards it also reads the best and the worst answer of a few generations.
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
MAX_GENERATIONS = 6  # most generations shown; the first and the last are among them


@dataclass(frozen=True)
class Series:
    """The values of one metric over a run; each array is `[points]`.

    tokens: consumed tokens at each point; NaN where not logged. values: may be NaN or infinite."""

    iterations: Numbers
    tokens: Numbers
    values: Numbers


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run. manifest: content of its manifest.json; {} if missing or unreadable."""

    iteration: int
    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A prompt of `demo_prompts`, with the model's answers before and after training; None: not answered
    then."""

    prompt: str
    before_training: str | None
    after_training: str | None


@dataclass(frozen=True)
class AnswerRow:
    """A prompt, the model's answer and its reward. rewards: text with the reward from each reward
    function."""

    prompt: str
    completion: str
    reward: float
    rewards: str


@dataclass(frozen=True)
class GenerationRows:
    """Numbers of one generation of answers, with its best and its worst answer.

    iteration: the first step that trains on the answers.
    answers: number of answers.
    mean: mean reward of the answers that have one.
    best, worst: the answers with the highest and lowest reward; None if no answer has a reward.
    """

    iteration: int
    answers: int
    mean: float | None
    best: AnswerRow | None
    worst: AnswerRow | None


@dataclass(frozen=True)
class Run:
    """The data of one run for a report.

    name: displayed name.
    rows: number of rows in metrics.jsonl.
    series: values of each metric, by name.
    args: the run's configuration; None if it cannot be read.
    status, summary: content of status.json and training_summary.json, or {}.
    answers: answers to `demo_prompts`. answers_at: iterations at which they were answered, sorted.
    load: load of experts; None if it was not logged.
    rollouts: generations of a run trained with rewards.
    problems: messages on unusable content of the run's files.
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
    """Returns the data of each run. paths: for each run its `save`, log folder or metrics.jsonl.

    Raises RunFolderError for a path without a run, and for two paths of the same run."""
    folders = [open_run(path) for path in paths]
    logs = [folder.logs.resolve() for folder in folders]
    for path, place in zip(paths, logs, strict=True):
        if logs.count(place) > 1:
            raise RunFolderError(f"{path}: this run is given twice (its log folder is {place}); give each run once")
    return [read_run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]


def read_run(folder: RunFolder, name: str, args: NeoXArgs | None = None) -> Run:
    """Reads the data of one run from its folders.

    name: displayed name. args: the run's configuration; None: read it from the log folder or a checkpoint."""
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
    """Returns the series of each metric that has numbers in these rows of metrics.jsonl, by name."""
    points: dict[
        str, array[float]
    ] = {}  # by metric: iteration, tokens and value of the first point, of the second, ...
    for row in rows:
        iteration, tokens = row["iteration"], row.get("consumed_tokens", math.nan)
        for name, value in row.items():
            if name not in POSITION and isinstance(value, int | float):
                points.setdefault(name, array("d")).extend((iteration, tokens, value))
    return {name: Series(*np.frombuffer(numbers).reshape(-1, 3).T) for name, numbers in points.items()}


def names_of(folders: Sequence[RunFolder]) -> list[str]:
    """Returns a displayed name for each run: the end of its path `save`, as short as keeps all names
    different.

    A run without `save` is named by its log folder."""
    places = [folder.save or (folder.logs.parent if folder.logs.name == "logs" else folder.logs) for folder in folders]
    names: list[str] = []
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(names):
            break
    return names


def _checkpoints(save: Path | None, problems: Problems) -> Iterator[Checkpoint]:
    """Yields the checkpoints global_stepN in `save`, in order of N. save: None yields nothing.

    Only manifest.json is read, without `megatron.checkpointing`, which imports torch."""
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
    """Returns the configuration in the newest checkpoint that has a readable one; None if there is none.

    It does not say where each key was set."""
    for checkpoint in reversed(checkpoints):
        if config := checkpoint.manifest.get("config"):
            try:
                return NeoXArgs.from_dict(config)
            except (UserError, ValueError, KeyError, TypeError, AttributeError) as problem:
                reason = f"config: this version cannot read it ({type(problem).__name__})"
                problems.note(Path(f"global_step{checkpoint.iteration}/manifest.json"), "", reason)
    return None


def _answers(save: Path | None, problems: Problems) -> tuple[list[Answer], tuple[int, ...]]:
    """Returns (answers to each demo prompt before and after training, sorted iterations of all answers).

    The answers come from step0.jsonl and the newest file in `<save>/demo_outputs`."""
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
    """Reads a file of answers in `demo_outputs`, and returns the answers by prompt.

    For an unusable line, and an unreadable file, it adds a message to `problems`."""
    answers = {}
    try:
        with open_file(path) as file:
            for line in file:
                try:
                    row = parse(line)
                    answers[_prompt(row)] = text(row["answer"])
                except (ValueError, KeyError, TypeError, Unfit) as problem:
                    problems.note(
                        path,
                        "",
                        f"a line has no prompt with an answer ({type(problem).__name__}: {problem}); skipped",
                    )
    except OSError as problem:
        problems.note(path, "", f"cannot be read ({problem.strerror})")
    return answers


def _prompt(line: Mapping[str, Any]) -> str:
    """Returns the prompt in a line of `demo_outputs` as text; a conversation as lines `role: content`."""
    if "messages" in line:
        return text("\n".join(f"{message['role']}: {message['content']}" for message in line["messages"]))
    return text(line["prompt"])


def _message_text(value: Any) -> str:
    """Returns a text unchanged, and a list of chat messages as one text with lines `role: content`.

    Raises Unfit for anything else."""
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
    """Returns at most MAX_GENERATIONS generations of answers, evenly chosen, from rollouts.jsonl in `logs`.

    [] without the file. problems: gets a message for each unusable line."""
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
