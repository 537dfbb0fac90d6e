"""A lane: the reward functions that share one worker process, which is restarted if it ends or hangs."""

import time
from collections.abc import Collection, Sequence
from typing import Any

from megatron.methods.reinforcement.rewards.worker_process import WorkerLost, WorkerProcess
from megatron.neox_arguments.values.integers import finite_float

# (reward, problem) of a completion. reward: None for none; problem: why judging failed, else None.
Judged = tuple[float | None, str | None]
ALL_ROWS = -1  # stands for a row number: the call with all completions at once
_START_S = 300.0  # time limit for the user's imports, which a busy shared file system may slow down
_TRIES = 4  # time limit for judging completions one by one, in multiples of the timeout of a call
_VERIFIER_TRIES = 10  # the same for a verifier
_VERIFIER_S = 3.0  # added to a verifier's own time limit, because it starts processes


class NotLoaded(Exception):
    """Raised if a worker cannot load a function. Holds the function's key and the reason."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key, self.reason = key, reason


class Lane:
    """Sends calls to one worker process, and restarts the process if it ends or hangs."""

    def __init__(self, timeout_s: float, variables: Collection[str] = ()) -> None:
        """Takes the time limit of a call, but starts no process yet.

        variables: names of environment variables that the worker gets besides the usual ones.
        """
        self._timeout_s, self._variables = timeout_s, variables
        self._functions: dict[str, dict[str, Any]] = {}
        self._worker: WorkerProcess | None = None
        self._completions = b""
        self._closed = False

    def add(self, key: str, function: dict[str, Any]) -> None:
        """Adds a function for the worker to load. key: the function's name in calls.

        function: `{"file", "name"}`, `{"judge", "name"}` or `{"verifier", "hidden"}`.
        """
        self._functions[key] = function

    def start(self) -> None:
        """Starts the worker and loads all functions, unless it already runs. Raises NotLoaded if this
        fails."""
        if self._closed:
            raise RuntimeError("these RewardFunctions were closed by close() and cannot be used again; create new ones")
        if self._worker is not None or not self._functions:
            return
        key = ""
        try:
            self._worker = WorkerProcess(self._variables)
            if self._closed:  # meanwhile, by another thread
                raise WorkerLost("these RewardFunctions were closed by close()")
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
        """Judges completions with all functions of this lane. Returns (reward, problem) by function and row.

        share: the rows that verifiers of this worker judge; users' functions judge all rows.
        completions: JSON message with all completions. number: how many they are.
        """
        self._completions = completions
        if self._worker is not None:
            try:
                self._hand_over()
            except WorkerLost:  # the worker ended between two calls; the first call starts another one
                self._stop()
        judged: dict[str, dict[int, Judged]] = {}
        for key, function in self._functions.items():
            if "verifier" in function:
                judged_share = self._one_by_one(key, share, _VERIFIER_TRIES, self._timeout_s + _VERIFIER_S)
                judged[key] = dict(zip(share, judged_share, strict=True))
            else:
                judged[key] = self._in_one_call(key, range(number))
        self._completions = b""
        return judged

    def close(self) -> None:
        """Ends the worker; the lane cannot be used afterwards."""
        self._closed = True
        self._stop()

    def _hand_over(self) -> None:
        """Sends the completions to the worker, and waits until it has read them.

        This keeps the time to read them out of the timeouts of functions.
        """
        if self._completions and self._worker is not None:
            self._worker.send_json(self._completions)
            self._worker.receive(_START_S, lambda answer: not answer)

    def _in_one_call(self, key: str, rows: Sequence[int]) -> dict[int, Judged]:
        """Judges all rows in one call; if this fails, each row in a call of its own. Returns (reward,
        problem) by row."""
        try:
            self._call(key, rows, in_one_call=True)
            reply = self._receive(self._timeout_s, len(rows))
            if isinstance(reply, list):
                return dict(zip(rows, reply, strict=True))
            reason = reply
        except WorkerLost as lost:
            self._stop()
            reason = str(lost)
        except NotLoaded as problem:
            return {row: (None, f"could not be loaded: {problem.reason}") for row in rows}
        if len(rows) == 1:
            return {rows[0]: (None, reason)}
        judged: dict[int, Judged] = dict(zip(rows, self._one_by_one(key, rows, _TRIES, self._timeout_s), strict=True))
        if all(problem is None for _, problem in judged.values()):
            judged[ALL_ROWS] = (
                None,
                f"{reason}, in the call with all {len(rows)} completions; in calls of their own all succeeded",
            )
        return judged

    def _one_by_one(self, key: str, rows: Sequence[int], tries: int, patience: float) -> list[Judged]:
        """Judges each row in a call of at most `patience` seconds. Returns a (reward, problem) for each row.

        After `tries` times the timeout in total, the remaining rows are given up. A call that ends the worker
        counts as one timeout.
        """
        judged: list[Judged] = []
        elapsed, limit_s = 0.0, tries * self._timeout_s
        while (done := len(judged)) < len(rows):
            if elapsed > limit_s - 1e-3:
                self._stop()  # the worker would still run the remaining calls
                given_up = f"not tried: earlier completions took longer than {tries} x {self._timeout_s:g} s"
                return judged + [(None, given_up)] * (len(rows) - done)
            try:
                self._call(key, rows[done:], in_one_call=False)
                for _ in rows[done:]:
                    started = time.monotonic()
                    reply = self._receive(patience, 1)
                    judged += reply if isinstance(reply, list) else [(None, reply)]
                    elapsed += time.monotonic() - started
                    if elapsed > limit_s - 1e-3:
                        break
            except WorkerLost as lost:
                self._stop()
                judged.append((None, str(lost)))
                elapsed += self._timeout_s
            except NotLoaded as problem:
                return judged + [(None, f"could not be loaded: {problem.reason}")] * (len(rows) - done)
        return judged

    def _call(self, key: str, rows: Sequence[int], in_one_call: bool) -> None:
        self.start()
        assert self._worker is not None
        self._worker.send({"call": key, "rows": list(rows), "together": in_one_call})

    def _receive(self, seconds: float, number: int) -> list[Judged] | str:
        """Waits for the answer to a call. Returns (reward, problem) of `number` rows, or the reason why the
        call failed."""
        assert self._worker is not None
        reply = self._worker.receive(seconds, lambda answer: is_verdict(answer, number))
        return [(value, problem) for value, problem in reply["judged"]] if "judged" in reply else reply["raised"]

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


def is_load_answer(answer: dict[str, Any]) -> bool:
    """Returns whether `answer` is a well-formed answer to a message that loads a function.

    Its only field is `problem`: why the function cannot be used, or null.
    """
    return list(answer) == ["problem"] and isinstance(answer["problem"], str | None)


def is_verdict(answer: dict[str, Any], number: int) -> bool:
    """Returns whether `answer` is a well-formed answer to a call with `number` completions.

    Its only field is `judged`, with a [reward, problem] per completion, or `raised`, with a text.
    """
    if list(answer) == ["raised"]:
        return isinstance(answer["raised"], str)
    judged = answer.get("judged")
    return (
        list(answer) == ["judged"]
        and isinstance(judged, list)
        and len(judged) == number
        and all(isinstance(pair, list) and len(pair) == 2 for pair in judged)
        and all(is_reward(value) and isinstance(problem, str | None) for value, problem in judged)
    )


def is_reward(value: Any) -> bool:
    """Returns whether a JSON value is a valid reward: a finite number, or None."""
    return value is None or finite_float(value) is not None
