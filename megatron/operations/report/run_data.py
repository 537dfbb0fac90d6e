"""What a report shows of a run, read from its folders: series of metrics, checkpoints, answers."""

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
from megatron.operations.report.rollout_rows import GenerationRows, read_rollouts
from megatron.operations.report.router_loads import RouterLoad, read_load
from megatron.operations.run_folder import RunFolder, RunFolderError, open_run
from megatron.process.metrics_file import POSITION
from megatron.process.run_files import (
    DATA_SHAPE,
    MANIFEST_SHAPE,
    Problems,
    Unfit,
    fields_of,
    open_file,
    parse,
    read_fields,
    text,
)

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One metric over a run: `[points]` each. tokens: read until then, NaN where a row does not say; values
    may be NaN or infinite."""

    iterations: Numbers
    tokens: Numbers
    values: Numbers


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is in `save`. manifest: its manifest.json, {} where there is none or it cannot be
    read."""

    iteration: int
    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A prompt of `demo_prompts`, and what the model wrote before training and after; None: not asked
    then."""

    prompt: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Run:
    """Everything that a report says of one run. rows: lines in its metrics.jsonl; args: None where no start
    has left its configuration; status, summary: status.json and training_summary.json, or {}; answers_at:
    iterations that the answers of `demo_prompts` were written at, in order; load: of experts, None where the
    model has none; rollouts: answers of a run that is trained with rewards; problems: what the files held
    that could not be used."""

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
    """The runs that paths name, each as `open_run` takes it. Raises RunFolderError for a path without a run,
    files that cannot be read, and a run that is named twice."""
    folders = [open_run(path) for path in paths]
    logs = [folder.logs.resolve() for folder in folders]
    for path, place in zip(paths, logs, strict=True):
        if logs.count(place) > 1:
            raise RunFolderError(f"{path}: this run is named twice (it logs into {place}); name each once")
    return [read_run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]


def read_run(folder: RunFolder, name: str, args: NeoXArgs | None = None) -> Run:
    """What the folders of a run hold. args: its configuration, where the caller knows it. Raises
    RunFolderError."""
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
    """Every number in the rows of a metrics.jsonl, by name."""
    points: dict[str, array[float]] = {}  # iteration, tokens and value of each, one after another
    for row in rows:
        iteration, tokens = row["iteration"], row.get("consumed_tokens", math.nan)
        for name, value in row.items():
            if name not in POSITION and isinstance(value, int | float):
                points.setdefault(name, array("d")).extend((iteration, tokens, value))
    return {name: Series(*np.frombuffer(numbers).reshape(-1, 3).T) for name, numbers in points.items()}


def names_of(folders: Sequence[RunFolder]) -> list[str]:
    """What runs are called: the last folders of their `save`, as many as tell all of them apart; of one
    without `save`, of its log folder."""
    places = [folder.save or (folder.logs.parent if folder.logs.name == "logs" else folder.logs) for folder in folders]
    names: list[str] = []
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(names):
            break
    return names


def _checkpoints(save: Path | None, problems: Problems) -> Iterator[Checkpoint]:
    """In order of their steps. Read here as text: the package of checkpoints imports torch."""
    found = save.glob("global_step*") if save is not None else ()
    for folder in sorted(found, key=lambda path: (len(path.name), path.name)):
        step = folder.name.removeprefix("global_step")
        if not re.fullmatch(r"[0-9]{1,18}", step) or not folder.is_dir():
            continue
        file = folder / "manifest.json"
        manifest = read_fields(file, MANIFEST_SHAPE, problems)

        def note(name: str, why: str, file: Path = file) -> None:
            problems.note(file, f"data.{name}", why)

        manifest["data"] = fields_of(manifest.get("data") or {}, DATA_SHAPE, note)
        yield Checkpoint(int(step), manifest)


def _saved_args(checkpoints: Sequence[Checkpoint], problems: Problems) -> NeoXArgs | None:
    """The configuration that the newest checkpoint keeps, without the origins of its keys."""
    for checkpoint in reversed(checkpoints):
        if config := checkpoint.manifest.get("config"):
            try:
                return NeoXArgs.from_dict(config)
            except (UserError, ValueError, KeyError, TypeError, AttributeError) as problem:
                why = f"config: none of this version ({type(problem).__name__})"
                problems.note(Path(f"global_step{checkpoint.iteration}/manifest.json"), "", why)
    return None


def _answers(save: Path | None, problems: Problems) -> tuple[list[Answer], tuple[int, ...]]:
    """The answers in `demo_outputs` before the first step and after the last, by what was asked."""
    files: dict[int, Path] = {}
    for path in (save / "demo_outputs").glob("step*.jsonl") if save is not None else ():
        if re.fullmatch(r"[0-9]{1,18}", step := path.stem.removeprefix("step")):
            files[int(step)] = path
    if not files:
        return [], ()
    first = _lines(files[0], problems) if 0 in files else {}
    last = _lines(files[max(files)], problems) if max(files) else {}
    asked = list(dict.fromkeys([*first, *last]))
    return [Answer(prompt, first.get(prompt), last.get(prompt)) for prompt in asked], tuple(sorted(files))


def _lines(path: Path, problems: Problems) -> dict[str, str]:
    """Answers by what was asked; a line that is none is noted."""
    found = {}
    try:
        with open_file(path) as file:
            for line in file:
                try:
                    row = parse(line)
                    found[_prompt(row)] = text(row["answer"])
                except (ValueError, KeyError, TypeError, Unfit) as problem:
                    problems.note(path, "", f"a line is no answer ({type(problem).__name__}: {problem}); left out")
    except OSError as problem:
        problems.note(path, "", f"cannot be read ({problem.strerror})")
    return found


def _prompt(line: Mapping[str, Any]) -> str:
    """What was asked, a conversation as lines of `role: content`."""
    if "messages" in line:
        return text("\n".join(f"{message['role']}: {message['content']}" for message in line["messages"]))
    return text(line["prompt"])
