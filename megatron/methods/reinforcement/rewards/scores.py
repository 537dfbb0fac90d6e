"""Completions that reward functions judge, and their rewards and failures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Completion:
    """One answer to be judged, or two to be compared.

    prompt: a string or a list of messages, as in the prompt file.
    completion: a text; for a pairwise judge two texts.
    columns: the other fields of the prompt's row, JSON values.
    messages: the conversation with an environment, whose last model text is `completion`; None without an
        environment.
    """

    prompt: str | list[dict[str, Any]]
    completion: str | tuple[str, str]
    completion_ids: list[int]
    columns: Mapping[str, Any]
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Failure:
    """A function's failure to give a completion a reward.

    row: the completion's index; None if only the call with all completions at once failed.
    reason: one line.
    """

    function: str
    row: int | None
    reason: str


@dataclass(frozen=True)
class Scores:
    """The rewards of some completions.

    parts: for each function one reward per completion; None if it gave none or failed.
    seconds: duration of the whole call.
    """

    parts: dict[str, list[float | None]]
    failures: list[Failure]
    seconds: float

    def total(self, weights: Sequence[float]) -> list[float | None]:
        """Returns the weighted sum of each completion's rewards; None if it has no reward, as in TRL.

        weights: one per function, in the order of `parts`. Raises ValueError for a wrong number of them."""
        if len(weights) != len(self.parts):
            raise ValueError(f"{len(weights)} weights for {len(self.parts)} reward functions")
        totals: list[float | None] = []
        for rewards in zip(*self.parts.values(), strict=True):
            weighted = [weight * reward for weight, reward in zip(weights, rewards, strict=True) if reward is not None]
            totals.append(sum(weighted) if weighted else None)
        return totals
