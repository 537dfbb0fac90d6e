"""`RewardFunctions`: the reward functions of a run, spread over worker processes."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from megatron.neox_arguments import UserError
from megatron.rollouts.rewards.lane import Judged, Lane, NotLoaded
from megatron.rollouts.rewards.scores import Completion, Failure, Scores
from megatron.rollouts.rewards.verifiers import VERIFIERS

T = TypeVar("T")


class RewardError(UserError, ValueError):
    """Reward functions that cannot be used; the message begins with the entry that is meant."""


class RewardFunctions:
    """Reward functions by entry: `FILE.py:NAME`, a function with TRL's signature, or the name of a verifier.

    They run in processes of their own. A user's function always runs in the same one, and judges all
    completions of a call together; the completions of a verifier are shared among all workers.
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
        """timeout_s: of a call of a user's function, and of a verifier for one completion. pairwise: the
        functions are judges, which compare two completions and give 0 or 1, the place of the better one.
        variables: of the environment, that functions are given beside the usual ones. hidden: folders
        that programs of a model may not see, as those with their tests.

        Nothing is started before `check` or `score`. Raises RewardError for an entry that names nothing."""
        self._entries: dict[str, str] = {}
        self._lanes = [Lane(timeout_s, variables) for _ in range(max(1, workers))]
        for entry in functions:
            key, file = _key(entry), entry.rpartition(":")[0]
            if key in self._entries:
                raise RewardError(f"{entry}: {self._entries[key]} has this name already; rename one of the functions")
            if pairwise and not file:
                raise RewardError(f"{entry}: expected FILE.py:NAME")
            if file:
                lane = self._lanes[len(self._entries) % len(self._lanes)]
                kind = "judge" if pairwise else "file"
                lane.add(key, {kind: str(Path(file).expanduser().resolve()), "name": key})
            else:
                for lane in self._lanes:
                    lane.add(key, {"verifier": key, "hidden": list(hidden)})
            self._entries[key] = entry

    def check(self, columns: Collection[str] | None = None) -> None:
        """Start the workers and load all functions. columns: the fields that rows of prompts have; None: not
        known. Raises RewardError for the first that does not work, or compares with a field that no row
        has."""
        if columns is not None:
            self._require(columns)
        try:
            self._in_threads(Lane.start, self._lanes)
        except NotLoaded as problem:
            raise RewardError(f"{self._entries.get(problem.key, 'rewards')}: {problem.reason}") from None

    def score(self, completions: Sequence[Completion]) -> Scores:
        """The rewards of all completions. Whatever functions do, it returns: their failures are named."""
        started = time.monotonic()
        judged = self._judge(completions) if completions else {key: {} for key in self._entries}
        rows = range(len(completions))
        failures = [
            Failure(key, row if row in rows else None, problem)
            for key, found in judged.items()
            for row, (_, problem) in found.items()
            if problem is not None
        ]
        parts = {key: [found[row][0] for row in rows] for key, found in judged.items()}
        return Scores(parts, failures, time.monotonic() - started)

    def close(self) -> None:
        """End the workers; `score` can no more be called."""
        for lane in self._lanes:
            lane.close()

    def _judge(self, completions: Sequence[Completion]) -> dict[str, dict[int, Judged]]:
        """By function and row what each completion got; ALL_ROWS is what failed for all of them together."""
        rows = [
            [one.prompt, one.completion, one.completion_ids, dict(one.columns), one.messages] for one in completions
        ]
        message = json.dumps({"completions": rows}).encode()
        shares = [range(number, len(rows), len(self._lanes)) for number in range(len(self._lanes))]
        judged: dict[str, dict[int, Judged]] = {key: {} for key in self._entries}
        for found in self._in_threads(partial(Lane.judge, completions=message, number=len(rows)), self._lanes, shares):
            for key, by_row in found.items():
                judged[key].update(by_row)
        return {key: dict(sorted(by_row.items())) for key, by_row in judged.items()}

    def _in_threads(self, function: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
        """A call for each lane, all at once; where one raises, the workers end."""
        with ThreadPoolExecutor(len(self._lanes)) as pool:
            try:
                return list(pool.map(function, *arguments))
            except BaseException:  # KeyboardInterrupt too; the threads would wait for the workers
                self.close()
                raise

    def _require(self, there: Collection[str]) -> None:
        for key, entry in self._entries.items():
            if entry != key:  # a function of the user's
                continue
            columns = VERIFIERS[key].columns
            if not set(there).intersection(columns):
                needed = " or ".join(columns)
                fix = "add it to the file of prompts (null in rows that are not to be judged by it)"
                raise RewardError(f"{entry}: no row of the prompts has a field {needed}; {fix}")
            if key == "json" and "schema" in there and find_spec("jsonschema") is None:
                raise RewardError(f"{entry}: rows with a schema need jsonschema: pip install jsonschema")


def _key(entry: str) -> str:
    """The name of an entry's function. Raises RewardError for what is neither FILE.py:NAME nor a verifier."""
    file, colon, name = entry.rpartition(":")
    if not colon and entry in VERIFIERS:
        return entry
    if not file or not name.isidentifier():
        raise RewardError(f"{entry}: expected FILE.py:NAME or one of {', '.join(sorted(VERIFIERS))}")
    return name
