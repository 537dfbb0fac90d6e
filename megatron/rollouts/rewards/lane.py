"""A lane: functions that share one worker process, and what is done when one of them fails in it."""

import math
import time
from collections.abc import Collection, Sequence
from typing import Any

from megatron.rollouts.rewards.worker_process import WorkerLost, WorkerProcess

# What a completion got: its reward, or None and, where that is a failure, why.
Judged = tuple[float | None, str | None]
ALL_ROWS = -1  # in the place of a row: the call for all of them
_START_S = 300.0  # of the user's imports, on a file system that all nodes start from
_TRIES = 4  # the time that completions one by one may take altogether, in calls that take too long
_VERIFIER_TRIES = 10  # the same of a verifier, in all of its calls
_VERIFIER_S = 3.0  # more than a verifier's own limit: it starts processes


class NotLoaded(Exception):
    """A function that cannot be used: its key, and why."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key, self.reason = key, reason


class Lane:
    """Sends calls to its worker and starts it again when it was lost."""

    def __init__(self, timeout_s: float, variables: Collection[str] = ()) -> None:
        """variables: of the environment, that the worker is given beside the usual ones."""
        self._timeout_s, self._variables = timeout_s, variables
        self._functions: dict[str, dict[str, Any]] = {}
        self._worker: WorkerProcess | None = None
        self._completions = b""
        self._closed = False

    def add(self, key: str, function: dict[str, Any]) -> None:
        """A function for the worker to load: `{"file", "name"}`, `{"judge", "name"}` or `{"verifier",
        "hidden"}`."""
        self._functions[key] = function

    def start(self) -> None:
        """Start the worker, if it does not run, and load the functions. Raises NotLoaded for one that does
        not work."""
        if self._closed:
            raise RuntimeError("the reward functions are closed")
        if self._worker is not None or not self._functions:
            return
        key = ""
        try:
            self._worker = WorkerProcess(self._variables)
            if self._closed:  # meanwhile, by another thread
                raise WorkerLost("the reward functions are closed")
            self._worker.send({"timeout_s": self._timeout_s})
            for key, function in self._functions.items():
                self._worker.send({"load": function, "key": key})
                if problem := self._worker.receive(_START_S, is_load_answer)["problem"]:
                    raise NotLoaded(key, problem)
            self._hand_over()
        except (WorkerLost, NotLoaded, OSError) as lost:
            self._stop()
            raise NotLoaded(key, lost.reason if isinstance(lost, NotLoaded) else str(lost)) from None

    def judge(self, share: Sequence[int], completions: bytes, number: int) -> dict[str, dict[int, Judged]]:
        """What each function gives by row: the user's judge all rows, verifiers those of `share`.

        completions: the message that hands the worker all of them. number: of completions."""
        self._completions = completions
        if self._worker is not None:
            try:
                self._hand_over()
            except WorkerLost:  # it ended between two calls; the first call starts another
                self._stop()
        judged: dict[str, dict[int, Judged]] = {}
        for key, function in self._functions.items():
            if "verifier" in function:
                found = self._one_by_one(key, share, _VERIFIER_TRIES, self._timeout_s + _VERIFIER_S)
                judged[key] = dict(zip(share, found, strict=True))
            else:
                judged[key] = self._together(key, range(number))
        self._completions = b""
        return judged

    def close(self) -> None:
        """End the worker and start none again."""
        self._closed = True
        self._stop()

    def _hand_over(self) -> None:
        """Give the worker the completions, and wait until it has read them: not the functions' time."""
        if self._completions and self._worker is not None:
            self._worker.send_json(self._completions)
            self._worker.receive(_START_S, lambda answer: not answer)

    def _together(self, key: str, rows: Sequence[int]) -> dict[int, Judged]:
        """One call for all rows; if it fails, each row alone."""
        try:
            self._call(key, rows, together=True)
            reply = self._receive(self._timeout_s, len(rows))
            if isinstance(reply, list):
                return dict(zip(rows, reply, strict=True))
            reason = reply
        except WorkerLost as lost:
            reason = str(lost)
        except NotLoaded as problem:
            return {row: (None, f"could not be loaded: {problem.reason}") for row in rows}
        if len(rows) == 1:
            return {rows[0]: (None, reason)}
        judged: dict[int, Judged] = dict(zip(rows, self._one_by_one(key, rows, _TRIES, self._timeout_s), strict=True))
        if all(problem is None for _, problem in judged.values()):
            judged[ALL_ROWS] = (None, f"{reason}, for all {len(rows)} completions; each alone did not")
        return judged

    def _one_by_one(self, key: str, rows: Sequence[int], tries: int, patience: float) -> list[Judged]:
        """A call for each row, of `patience` seconds at most. Those that are left when all together took
        `tries` times the limit are given up; a call that ends the worker counts for one that takes too
        long."""
        judged: list[Judged] = []
        spent, limit_s = 0.0, tries * self._timeout_s
        while (done := len(judged)) < len(rows):
            if spent > limit_s - 1e-3:
                self._stop()  # it still has the other calls
                given_up = f"not tried: those before took longer than {tries} x {self._timeout_s:g} s"
                return judged + [(None, given_up)] * (len(rows) - done)
            try:
                self._call(key, rows[done:], together=False)
                for _ in rows[done:]:
                    started = time.monotonic()
                    reply = self._receive(patience, 1)
                    judged += reply if isinstance(reply, list) else [(None, reply)]
                    spent += time.monotonic() - started
                    if spent > limit_s - 1e-3:
                        break
            except WorkerLost as lost:
                judged.append((None, str(lost)))
                spent += self._timeout_s
            except NotLoaded as problem:
                return judged + [(None, f"could not be loaded: {problem.reason}")] * (len(rows) - done)
        return judged

    def _call(self, key: str, rows: Sequence[int], together: bool) -> None:
        self.start()
        assert self._worker is not None
        try:
            self._worker.send({"call": key, "rows": list(rows), "together": together})
        except WorkerLost:
            self._stop()
            raise

    def _receive(self, seconds: float, number: int) -> list[Judged] | str:
        """The rewards and failures of so many rows, or in one line why the whole call failed."""
        assert self._worker is not None
        try:
            reply = self._worker.receive(seconds, lambda answer: is_verdict(answer, number))
        except WorkerLost:
            self._stop()
            raise
        return [(value, problem) for value, problem in reply["judged"]] if "judged" in reply else reply["raised"]

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


def is_load_answer(answer: dict[str, Any]) -> bool:
    """Whether it answers a message that loads users' code: null, or why it cannot be used."""
    return list(answer) == ["problem"] and isinstance(answer["problem"], str | None)


def is_verdict(answer: dict[str, Any], number: int) -> bool:
    """Whether it answers a call about so many completions."""
    if list(answer) == ["raised"]:
        return isinstance(answer["raised"], str)
    judged = answer.get("judged")
    return (
        list(answer) == ["judged"]
        and isinstance(judged, list)
        and len(judged) == number
        and all(isinstance(one, list) and len(one) == 2 for one in judged)
        and all(is_reward(value) and isinstance(problem, str | None) for value, problem in judged)
    )


def is_reward(value: Any) -> bool:
    """Whether a value of JSON is a reward: a finite number, or None."""
    return value is None or (type(value) in (int, float) and math.isfinite(value))
