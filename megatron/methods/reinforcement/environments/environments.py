"""Starts the environments of conversations on rank 0, and calls them."""

import itertools
import resource
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.methods.reinforcement.environments.host import are_messages
from megatron.methods.reinforcement.rewards.functions import RewardError
from megatron.methods.reinforcement.rewards.lane import is_load_answer, is_reward
from megatron.methods.reinforcement.rewards.worker_process import Messages, WorkerLost, WorkerProcess

Observation = str | list[dict[str, Any]] | None
"""The answer of an environment's `reset` or `step` to the model: a text, messages, or nothing."""
_END_S = 5.0  # for the host to end the processes of conversations
_START_S = 300.0  # of the user's imports, on a file system that all nodes start from


class EnvironmentFailure(Exception):
    """Raised if an environment fails or ends; the message says why in one line."""


@dataclass(frozen=True)
class Outcome:
    """The result of an environment's `step`. done: whether the conversation is over."""

    observation: Observation
    reward: float | None
    done: bool


class Environments:
    """Starts environments: instances of a user's class, one process for each conversation. Thread-safe."""

    def __init__(self, entry: str, *, timeout_s: float, workers: int, variables: Collection[str] = ()) -> None:
        """Starts no process yet: `check` and `open` do. entry: `FILE.py:CLASS`.

        timeout_s: for one call of `reset` or `step`. workers: maximum number of simultaneous calls.
        variables: environment variables that the processes get besides the usual ones. Raises RewardError for
        an invalid entry."""
        file, _, name = entry.rpartition(":")
        if not file or not name.isidentifier():
            raise RewardError(f"{entry}: expected FILE.py:CLASS")
        self.entry, self.timeout_s, self.workers, self._variables = entry, timeout_s, workers, variables
        self._class = {"file": str(Path(file).expanduser().resolve()), "name": name}
        self._numbers = itertools.count()
        self.calls = threading.Semaphore(workers)  # taken by each call to a conversation's process
        self._lock = threading.Lock()  # of what follows
        self._host: WorkerProcess | None = None
        self._closed = False

    def check(self, columns: Collection[str] = ()) -> None:
        """Starts the host process, which loads the class. columns: fields of prompt rows besides the prompt.

        Raises RewardError if this fails, or if a field is called `prompt` or `seed`, like arguments of
        `reset`."""
        for name in ("prompt", "seed"):
            if name in columns:
                problem_text = "reset(prompt, seed, **columns) has an argument of this name; rename the field"
                raise RewardError(f"{self.entry}: prompt rows have a field {name}, but {problem_text}")
        files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != hard_limit:  # each conversation that is held has a socket here, and 1024 files are common
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        with self._lock:
            try:
                self._running_host()
            except EnvironmentFailure as problem:
                raise RewardError(f"{self.entry}: {problem}") from None

    def open(self) -> "Environment":
        """Starts the environment of a conversation. Raises EnvironmentFailure."""
        try:
            parent_end, process_end = socket.socketpair()
        except OSError as problem:
            raise EnvironmentFailure(f"could not be started: {problem.strerror}; check ulimit -n") from None
        number = next(self._numbers)
        with process_end, self._lock:
            try:
                try:
                    host = self._running_host()
                    host.send_socket({"start": number}, process_end)
                except WorkerLost:  # it ended between two calls: another is started
                    self._stop_host()
                    host = self._running_host()
                    host.send_socket({"start": number}, process_end)
            except (WorkerLost, EnvironmentFailure) as problem:
                parent_end.close()
                raise EnvironmentFailure(f"could not be started: {problem}") from None
        return Environment(self, host, number, Messages(parent_end))

    def end(self, host: WorkerProcess, number: int) -> None:
        """Ends a conversation's process."""
        with self._lock:
            if host is self._host:
                try:
                    host.send({"stop": number})
                except WorkerLost:
                    self._stop_host()

    def close(self) -> None:
        """Ends all processes for good."""
        self._closed = True
        with self._lock:
            self._stop_host()

    def _running_host(self) -> WorkerProcess:
        if self._closed:
            raise EnvironmentFailure("the run ends")
        if self._host is None:
            self._host = WorkerProcess(self._variables, "megatron.methods.reinforcement.environments.host")
            try:
                self._host.send({"load": self._class})
                problem = self._host.receive(_START_S, is_load_answer)["problem"]
            except WorkerLost as lost:
                problem = str(lost)
            if problem:
                self._stop_host()
                raise EnvironmentFailure(problem)
        return self._host

    def _stop_host(self) -> None:
        if self._host is not None:
            self._host.stop(_END_S)
            self._host = None


class Environment:
    """The environment of one conversation. Its methods raise EnvironmentFailure."""

    def __init__(self, environments: Environments, host: WorkerProcess, number: int, messages: Messages) -> None:
        self._environments, self._host, self._number, self._messages = environments, host, number, messages
        self._lost = False

    def reset(self, prompt: Any, seed: int, columns: Mapping[str, Any]) -> Observation:
        """Starts the conversation; returns the first observation. columns: other fields of the prompt row."""
        message = {"reset": {**columns, "prompt": prompt, "seed": seed}}
        return self._call(message, lambda answer: _is_observation(answer, "observation"))["observation"]

    def step(self, completion: str, completion_ids: Sequence[int] = ()) -> Outcome:
        """Gives the model's text to the environment; returns its answer. completion_ids: the text as ids."""
        return Outcome(**self._call({"step": completion, "completion_ids": list(completion_ids)}, _is_outcome))

    def finish(self) -> None:
        """Calls the user's `close`, unless the process no longer answers."""
        if not self._lost:
            self._call({"close": True}, lambda answer: not answer)

    def close(self) -> None:
        """Ends the process of this conversation and its descendants."""
        self._messages.close()
        self._environments.end(self._host, self._number)

    def _call(self, message: dict[str, Any], good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Sends a message to the process of this conversation, and returns its answer.

        good: returns whether an answer has the right form."""
        self._lost = True  # until it has answered
        with self._environments.calls:
            try:
                self._messages.send(message)
                wait_s = self._environments.timeout_s
                answer = self._messages.receive(wait_s, lambda answer: good(answer) or _is_raised(answer))
            except WorkerLost as lost:
                raise EnvironmentFailure(str(lost)) from None
        self._lost = False
        if "raised" in answer:
            raise EnvironmentFailure(answer["raised"])
        return answer


def _is_raised(answer: dict[str, Any]) -> bool:
    return list(answer) == ["raised"] and isinstance(answer["raised"], str)


def _is_observation(answer: dict[str, Any], *fields: str) -> bool:
    """Returns whether an answer has exactly `fields`, and its observation is None, a text or messages."""
    observation = answer.get("observation")
    is_valid = are_messages(observation) if isinstance(observation, list) else isinstance(observation, str | None)
    return answer.keys() == set(fields) and is_valid


def _is_outcome(answer: dict[str, Any]) -> bool:
    return (
        _is_observation(answer, "observation", "reward", "done")
        and is_reward(answer["reward"])
        and isinstance(answer["done"], bool)
    )
