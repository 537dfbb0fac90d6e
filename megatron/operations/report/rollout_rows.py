"""What a model that is trained with rewards wrote: of a few generations the best and the worst answer, from
`rollouts.jsonl`."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.process.metrics_file import ROLLOUTS_FILE, read_metrics

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


def read_rollouts(logs: Path) -> list[GenerationRows]:
    """Some generations in a run's log folder, in order and evenly spaced; none where the run has no such
    file."""
    path = logs / ROLLOUTS_FILE
    rows = (row for _, row in read_metrics(path)) if path.is_file() else iter(())
    by_generation = itertools.groupby(rows, key=lambda row: (row["iteration"], row.get("generation")))
    found = [_generation(list(answers)) for _, answers in by_generation]
    last = len(found) - 1
    places = range(len(found)) if last < SHOWN else [round(last * i / (SHOWN - 1)) for i in range(SHOWN)]
    return [found[place] for place in places]


def _generation(rows: Sequence[dict[str, Any]]) -> GenerationRows:
    judged = [row for row in rows if isinstance(row.get("reward"), int | float)]
    mean = sum(row["reward"] for row in judged) / len(judged) if judged else None
    best, worst = ((_answer(pick(judged, key=lambda row: row["reward"])) if judged else None) for pick in (max, min))
    return GenerationRows(rows[0]["iteration"], len(rows), mean, best, worst)


def _answer(row: dict[str, Any]) -> AnswerRow:
    text = _text(row.get("prompt", ""))
    parts = row.get("rewards")
    words = [f"{name} {'none' if value is None else f'{value:g}'}" for name, value in (parts or {}).items()]
    written = _text(row["messages"] if row.get("messages") else row.get("completion", ""))
    return AnswerRow(text, written, row["reward"], ", ".join(words))


def _text(said: Any) -> str:
    """A text as it is, messages a line each."""
    if not isinstance(said, list):
        return str(said)
    return "\n".join(
        f"{one.get('role')}: {one.get('content')}" if isinstance(one, dict) else json.dumps(one) for one in said
    )
