"""What a model that is trained with rewards wrote: of a few generations the best and the worst answer, from
`rollouts.jsonl`."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.process.metrics_file import ROLLOUTS_FILE, read_lines
from megatron.process.run_files import Problems, Shape, Unfit, anything, count, each, fields_of, number, text

SHOWN = 6  # generations, the first and the last among them


@dataclass(frozen=True)
class AnswerRow:
    """An answer as the page shows it. rewards: by function, in words."""

    prompt: str
    completion: str
    reward: float
    rewards: str


@dataclass(frozen=True)
class GenerationRows:
    """A generation of answers. iteration: of the first step on them; mean: of the rewards that there are;
    answers: how many were written; best, worst: None where none has a reward."""

    iteration: int
    answers: int
    mean: float | None
    best: AnswerRow | None
    worst: AnswerRow | None


def _said(value: Any) -> str:
    """A text as it is, messages a line each."""
    if not isinstance(value, list):
        return text(value)
    if not all(isinstance(one, dict) for one in value):
        raise Unfit("a text or messages")
    return text("\n".join(f"{one.get('role')}: {one.get('content')}" for one in value))


_SHAPE: Shape = {
    "iteration": count, "generation": anything, "prompt": _said, "completion": _said, "messages": _said,
    "reward": number, "rewards": each(number),
}  # fmt: skip


def read_rollouts(logs: Path, problems: Problems) -> list[GenerationRows]:
    """Some generations in a run's log folder, in order and evenly spaced; none where the run has no such
    file."""
    path = logs / ROLLOUTS_FILE
    lines = (row for _, row in read_lines(path, problems)) if path.is_file() else iter(())
    rows = (fields_of(row, _SHAPE, lambda name, why: problems.note(path, name, why)) for row in lines)
    by_generation = itertools.groupby(rows, key=lambda row: (row["iteration"], row.get("generation")))
    found = [_generation(list(answers)) for _, answers in by_generation]
    last = len(found) - 1
    places = range(len(found)) if last < SHOWN else [round(last * i / (SHOWN - 1)) for i in range(SHOWN)]
    return [found[place] for place in places]


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
