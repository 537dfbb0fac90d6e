"""Reads `rollouts.jsonl`: the best and the worst answer of a few generations of a model trained with
rewards."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.process.metrics_file import ROLLOUTS_FILE, read_lines
from megatron.process.run_files import Problems, Shape, Unfit, any_value, count, fields_of, map_of, number, text

MAX_GENERATIONS = 6  # generations, the first and the last among them


@dataclass(frozen=True)
class AnswerRow:
    """An answer as the page shows it. rewards: text with the reward of each function."""

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


def _message_text(value: Any) -> str:
    """Returns a text unchanged; messages become one text, with a line `role: content` for each."""
    if not isinstance(value, list):
        return text(value)
    if not all(isinstance(message, dict) for message in value):
        raise Unfit("a text or messages")
    return text("\n".join(f"{message.get('role')}: {message.get('content')}" for message in value))


_SHAPE: Shape = {
    "iteration": count, "generation": any_value, "reward": number, "rewards": map_of(number),
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
    last_index = len(generations) - 1
    indices = (
        range(len(generations))
        if last_index < MAX_GENERATIONS
        else [round(last_index * i / (MAX_GENERATIONS - 1)) for i in range(MAX_GENERATIONS)]
    )
    return [generations[index] for index in indices]


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
