"""Defines `RewardFunctions`, which runs the reward functions of a run in worker processes."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

from megatron.methods.reinforcement.rewards.lane import Judged, Lane, NotLoaded
from megatron.methods.reinforcement.rewards.verifiers import VERIFIERS
from megatron.neox_arguments import UserError
from megatron.neox_arguments.values.local_paths import with_home

T = TypeVar("T")


class RewardError(UserError, ValueError):
    """Raised if a reward function cannot be used; the message begins with its entry in the configuration."""


@dataclass(frozen=True)
class Completion:
    """An answer to be judged, or two answers to be compared.

    prompt: a string or a list of messages, as in the prompt file.
    completion: a text; for a pairwise judge two texts.
    completion_ids: the text as token ids.
    columns: the other fields of the prompt's row, JSON values.
    messages: the conversation with an environment, of which `completion` is the model's last text; None
        without an environment.
    """

    prompt: str | list[dict[str, Any]]
    completion: str | tuple[str, str]
    completion_ids: list[int]
    columns: Mapping[str, Any]
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Failure:
    """A reward function's failure to judge a completion.

    function: name of the function.
    row: index of the completion; None if the call with all completions failed, but each succeeded alone.
    reason: why it failed, in one line.
    """

    function: str
    row: int | None
    reason: str


@dataclass(frozen=True)
class Scores:
    """The rewards of a list of completions.

    parts: for each function one reward per completion; None where it gave none or failed.
    """

    parts: dict[str, list[float | None]]
    failures: list[Failure]

    def total(self, weights: Sequence[float]) -> list[float | None]:
        """Returns the weighted sum of each completion's rewards; None for a completion without any reward, as
        in TRL.

        weights: one per function, in the order of `parts`. Raises ValueError for a wrong number of weights.
        """
        if len(weights) != len(self.parts):
            raise ValueError(
                f"got {len(weights)} weights for {len(self.parts)} reward functions, expected one for each"
            )
        totals: list[float | None] = []
        for rewards in zip(*self.parts.values(), strict=True):
            weighted = [weight * reward for weight, reward in zip(weights, rewards, strict=True) if reward is not None]
            totals.append(sum(weighted) if weighted else None)
        return totals


class RewardFunctions:
    """Runs reward functions in worker processes.

    A function is given by an entry: `FILE.py:NAME` for a user's function with TRL's signature, or the name of
    a built-in verifier. A user's function gets all completions of a call at once, always in the same
    worker. For a verifier the completions are distributed over all workers.
    """

    def __init__(
        self,
        functions: Sequence[str],
        *,
        timeout_s: float,
        workers: int = 1,
        pairwise: bool = False,
        variables: Collection[str] = (),
        hidden: Sequence[str] = (),
    ) -> None:
        """Reads the entries. Starts no worker yet: `check` or `score` does.

        timeout_s: time limit for one call of a user's function, and for one completion by a verifier.
        pairwise: the functions are judges, which compare two completions and return the index (0 or 1) of the
            better one.
        variables: names of environment variables that functions get besides the usual ones.
        hidden: folders that programs in answers may not see, such as those with their tests.
        Raises RewardError for an invalid entry.
        """
        self._entries: dict[str, str] = {}
        self._lanes = [Lane(timeout_s, variables) for _ in range(max(1, workers))]
        for entry in functions:
            key, file = _key(entry), entry.rpartition(":")[0]
            if key in self._entries:
                raise RewardError(f"{entry}: {self._entries[key]} has the same name; rename one of the two functions")
            if pairwise and not file:
                raise RewardError(
                    f"{entry}: expected FILE.py:NAME of a judge; built-in verifiers cannot compare answers"
                )
            if file:
                lane = self._lanes[len(self._entries) % len(self._lanes)]
                kind = "judge" if pairwise else "file"
                lane.add(key, {kind: str(with_home(file).resolve()), "name": key})
            else:
                for lane in self._lanes:
                    lane.add(key, {"verifier": key, "hidden": list(hidden)})
            self._entries[key] = entry

    def check(self, columns: Collection[str] | None = None) -> None:
        """Starts the workers and loads all functions.

        columns: names of the fields of prompt rows; None if unknown. Raises RewardError for the first
            function that cannot be loaded, or needs a field that no row has.
        """
        if columns is not None:
            self._require(columns)
        try:
            self._in_threads(Lane.start, self._lanes)
        except NotLoaded as problem:
            raise RewardError(f"{self._entries.get(problem.key, 'rewards')}: {problem.reason}") from None

    def score(self, completions: Sequence[Completion]) -> Scores:
        """Returns the rewards of completions by all functions. Exceptions of functions become failures and
        are not raised."""
        judged = self._judge(completions) if completions and self._entries else {key: {} for key in self._entries}
        rows = range(len(completions))
        failures = [
            Failure(key, row if row in rows else None, problem)
            for key, judged_rows in judged.items()
            for row, (_, problem) in judged_rows.items()
            if problem is not None
        ]
        parts = {key: [judged_rows[row][0] for row in rows] for key, judged_rows in judged.items()}
        return Scores(parts, failures)

    def close(self) -> None:
        """Ends the workers; `score` cannot be called afterwards."""
        for lane in self._lanes:
            lane.close()

    def _judge(self, completions: Sequence[Completion]) -> dict[str, dict[int, Judged]]:
        """Returns (reward, problem) by function and row.

        If only the call with all completions at once failed, its problem is in the extra row ALL_ROWS.
        """
        rows = [[c.prompt, c.completion, c.completion_ids, dict(c.columns), c.messages] for c in completions]
        message = json.dumps({"completions": rows}).encode()
        shares = [range(number, len(rows), len(self._lanes)) for number in range(len(self._lanes))]
        judged: dict[str, dict[int, Judged]] = {key: {} for key in self._entries}
        judge = partial(Lane.judge, completions=message, number=len(rows))
        for lane_judged in self._in_threads(judge, self._lanes, shares):
            for key, judged_rows in lane_judged.items():
                judged[key].update(judged_rows)
        return {key: dict(sorted(judged_rows.items())) for key, judged_rows in judged.items()}

    def _in_threads(self, function: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
        """Calls `function` for all lanes in parallel, and returns the results. An exception ends all
        workers."""
        with ThreadPoolExecutor(len(self._lanes)) as pool:
            try:
                return list(pool.map(function, *arguments))
            except BaseException:  # KeyboardInterrupt too: ends workers, for which threads would still wait
                self.close()
                raise

    def _require(self, prompt_columns: Collection[str]) -> None:
        for key, entry in self._entries.items():
            if entry != key:  # FILE.py:NAME, a user's function
                continue
            columns = VERIFIERS[key].columns
            if not set(prompt_columns).intersection(columns):
                column_names = " or ".join(columns)
                fix = "add it to the file of prompts (null in rows that this verifier must skip)"
                raise RewardError(f"{entry}: no row of the prompts has a field {column_names}; {fix}")
            if key == "json" and "schema" in prompt_columns and find_spec("jsonschema") is None:
                raise RewardError(
                    f"{entry}: prompts with a field schema need the package jsonschema: pip install jsonschema"
                )


def _key(entry: str) -> str:
    """Returns the name of a function: NAME of `FILE.py:NAME`, or the name of a verifier.

    Raises RewardError for other entries.
    """
    file, colon, name = entry.rpartition(":")
    if not colon and entry in VERIFIERS:
        return entry
    if not file or not name.isidentifier():
        raise RewardError(f"{entry}: expected FILE.py:NAME or one of {', '.join(sorted(VERIFIERS))}")
    return name
