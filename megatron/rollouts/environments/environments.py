"""The environments of a run as its rank 0 sees them."""

import itertools
import resource
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.rollouts.rewards.functions import RewardError
from megatron.rollouts.rewards.lane import is_load_answer, is_reward
from megatron.rollouts.rewards.worker_process import Messages, WorkerLost, WorkerProcess

Observation = str | list[dict[str, Any]] | None
"""What `reset` and `step` of an environment say to the model: a text, messages, or nothing."""
_END_S = 5.0  # for the host to end the processes of conversations
_START_S = 300.0  # of the user's imports, on a file system that all nodes start from


class EnvironmentFailure(Exception):
    """An environment that cannot go on; the message says why in one line."""


@dataclass(frozen=True)
class Outcome:
    """What `step` of an environment returned. done: whether the conversation is over."""

    observation: Observation
    reward: float | None
    done: bool


class Environments:
    """Starts the environments of conversations, instances of the class `FILE.py:NAME`, each in a process of
    its own. Threads may use it side by side."""

    def __init__(self, entry: str, *, timeout_s: float, workers: int, variables: Collection[str] = ()) -> None:
        """timeout_s: of a call of `reset` or `step`. workers: calls at a time. variables: of the environment
        of this process, that theirs are given beside the usual ones.

        Nothing is started before `check` or `open`. Raises RewardError for an entry that names nothing."""
        file, _, name = entry.rpartition(":")
        if not file or not name.isidentifier():
            raise RewardError(f"{entry}: expected FILE.py:CLASS")
        self.entry, self.timeout_s, self.workers, self._variables = entry, timeout_s, workers, variables
        self._class = {"file": str(Path(file).expanduser().resolve()), "name": name}
        self._numbers = itertools.count()
        self._calls = threading.Semaphore(workers)
        self._lock = threading.Lock()  # of what follows
        self._host: WorkerProcess | None = None
        self._closed = False

    def check(self, columns: Collection[str] = ()) -> None:
        """Start the host and load the class. columns: the fields that rows of prompts have beside the prompt.
        Raises RewardError if that does not work, or `reset` would be given two values of one name."""
        for name in ("prompt", "seed"):
            if name in columns:
                given = f"reset(prompt, seed, **columns) is given another {name}; rename the field"
                raise RewardError(f"{self.entry}: rows of prompts have a field {name}, and {given}")
        files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != most:  # each conversation that is held has a socket here, and 1024 files are common
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with self._lock:
            try:
                self._running_host()
            except EnvironmentFailure as problem:
                raise RewardError(f"{self.entry}: {problem}") from None

    def open(self) -> "Environment":
        """A conversation's environment. Raises EnvironmentFailure."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as problem:
            raise EnvironmentFailure(f"could not be started: {problem.strerror}, see ulimit -n") from None
        number = next(self._numbers)
        with theirs, self._lock:
            try:
                try:
                    host = self._running_host()
                    host.send_with({"start": number}, theirs)
                except WorkerLost:  # it ended between two calls: another is started
                    self._stop_host()
                    host = self._running_host()
                    host.send_with({"start": number}, theirs)
            except (WorkerLost, EnvironmentFailure) as problem:
                ours.close()
                raise EnvironmentFailure(f"could not be started: {problem}") from None
        return Environment(self, host, number, Messages(ours))

    def call(
        self, messages: Messages, message: dict[str, Any], good: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        """Send a message to the process of a conversation; its answer. Raises EnvironmentFailure where none
        comes in time."""
        with self._calls:
            try:
                messages.send(message)
                return messages.receive(self.timeout_s, lambda answer: good(answer) or _is_raised(answer))
            except WorkerLost as lost:
                raise EnvironmentFailure(str(lost)) from None

    def end(self, host: WorkerProcess, number: int) -> None:
        """End a conversation's process."""
        with self._lock:
            if host is self._host:
                try:
                    host.send({"stop": number})
                except WorkerLost:
                    self._stop_host()

    def close(self) -> None:
        """End all processes, and start none again."""
        self._closed = True
        with self._lock:
            self._stop_host()

    def _running_host(self) -> WorkerProcess:
        if self._closed:
            raise EnvironmentFailure("the run ends")
        if self._host is None:
            self._host = WorkerProcess(self._variables, "megatron.rollouts.environments.host")
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
        """Begin. columns: the other fields of the prompt's row."""
        message = {"reset": {**columns, "prompt": prompt, "seed": seed}}
        return self._call(message, lambda answer: _is_observation(answer, "observation"))["observation"]

    def step(self, completion: str, completion_ids: Sequence[int] = ()) -> Outcome:
        """Hand it what the model has said, as a text and as tokens."""
        return Outcome(**self._call({"step": completion, "completion_ids": list(completion_ids)}, _is_outcome))

    def finish(self) -> None:
        """Let it give back what it holds elsewhere (`close`), if it answers."""
        if not self._lost:
            self._call({"close": True}, lambda answer: not answer)

    def close(self) -> None:
        """End its process, and all that it has started."""
        self._messages.close()
        self._environments.end(self._host, self._number)

    def _call(self, message: dict[str, Any], good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        self._lost = True  # until it has answered
        answer = self._environments.call(self._messages, message, good)
        self._lost = False
        if "raised" in answer:
            raise EnvironmentFailure(answer["raised"])
        return answer


def _is_raised(answer: dict[str, Any]) -> bool:
    return list(answer) == ["raised"] and isinstance(answer["raised"], str)


def _is_observation(answer: dict[str, Any], *fields: str) -> bool:
    """Whether an answer has these fields and no others, of which `observation` is nothing, a text or
    messages."""
    said = answer.get("observation")
    messages = said if isinstance(said, list) else []
    return (
        answer.keys() == set(fields)
        and isinstance(said, str | list | None)
        and all(
            isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
            for one in messages
        )
    )


def _is_outcome(answer: dict[str, Any]) -> bool:
    return (
        _is_observation(answer, "observation", "reward", "done")
        and is_reward(answer["reward"])
        and isinstance(answer["done"], bool)
    )
