"""Completions that reward functions judge, and their rewards and failures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Completion:
    """One answer to be judged, or two that are compared.

    prompt: as the file of prompts has it, a string or a list of messages. completion: a text; for a pairwise
    judge two. columns: the other fields of the prompt's row, which are values of JSON. messages: of a
    conversation with an environment, of which `completion` is what the model said last; None where there is
    no environment."""

    prompt: str | list[dict[str, Any]]
    completion: str | tuple[str, str]
    completion_ids: list[int]
    columns: Mapping[str, Any]
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Failure:
    """A function that gave a completion no reward although it should have.

    row: the completion's place among those of the call; None where the call for all of them failed and each
    alone did not. reason: one line."""

    function: str
    row: int | None
    reason: str


@dataclass(frozen=True)
class Scores:
    """The rewards of some completions.

    parts: of each function one value a completion; None where it gave none or failed. seconds: the whole call
    took."""

    parts: dict[str, list[float | None]]
    failures: list[Failure]
    seconds: float

    def total(self, weights: Sequence[float]) -> list[float | None]:
        """The weighted sum of the rewards that each completion has; None where it has none, as TRL's.

        weights: one for each function, in their order. Raises ValueError for another number of them."""
        if len(weights) != len(self.parts):
            raise ValueError(f"{len(weights)} weights for {len(self.parts)} reward functions")
        totals: list[float | None] = []
        for rewards in zip(*self.parts.values(), strict=True):
            there = [weight * reward for weight, reward in zip(weights, rewards, strict=True) if reward is not None]
            totals.append(sum(there) if there else None)
        return totals
