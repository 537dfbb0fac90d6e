"""Starts the environments of conversations on rank 0, and calls them."""

import itertools
import resource
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.methods.reinforcement.environments.host import are_messages
from megatron.methods.reinforcement.rewards.functions import RewardError
from megatron.methods.reinforcement.rewards.lane import is_load_answer, is_reward
from megatron.methods.reinforcement.rewards.worker_process import Messages, WorkerLost, WorkerProcess
from megatron.neox_arguments.values.local_paths import with_home

Observation = str | list[dict[str, Any]] | None
"""The return value of an environment's `reset` for the model to read: a text, a list of messages, or None.

Also the first item that `step` returns.
"""
_END_S = 5.0  # time limit for the host to end the processes of conversations
_START_S = 300.0  # time limit for the user's imports, which a busy shared file system may slow down


class EnvironmentFailure(Exception):
    """Raised if an environment fails or its process ends; the message says why in one line."""


@dataclass(frozen=True)
class Outcome:
    """The result of an environment's `step`.

    observation: for the model to read next. reward: of this step, None for no reward.
    done: whether the conversation is over.
    """

    observation: Observation
    reward: float | None
    done: bool


class Environments:
    """Starts environments: instances of a user's class, one process for each conversation. Thread-safe."""

    def __init__(self, entry: str, *, timeout_s: float, workers: int, variables: Collection[str] = ()) -> None:
        """Takes the class's location `entry`, FILE.py:CLASS, but starts no process yet: `check` and `open`
        do.

        timeout_s: time limit for one call of `reset` or `step`.
        workers: maximum number of simultaneous calls.
        variables: names of environment variables that the processes get besides the usual ones.
        Raises RewardError if `entry` has another form.
        """
        file, _, name = entry.rpartition(":")
        if not file or not name.isidentifier():
            raise RewardError(f"{entry}: expected FILE.py:CLASS")
        self.entry, self.timeout_s, self.workers, self._variables = entry, timeout_s, workers, variables
        self._class = {"file": str(with_home(file).resolve()), "name": name}
        self._numbers = itertools.count()
        self.calls = threading.Semaphore(workers)  # taken by each call to a conversation's process
        self._lock = threading.Lock()  # guards _host
        self._host: WorkerProcess | None = None
        self._closed = False

    def check(self, columns: Collection[str] = ()) -> None:
        """Starts the host process, which loads the user's class.

        columns: names of the fields of prompt rows, except the prompt. Raises RewardError if the class cannot
            be used, or if a field is called `prompt` or `seed`, like an argument of `reset`.
        """
        for name in ("prompt", "seed"):
            if name in columns:
                problem_text = "reset(prompt, seed, **columns) has an argument of this name; rename the field"
                raise RewardError(f"{self.entry}: prompt rows have a field {name}, but {problem_text}")
        files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != hard_limit:  # each open conversation has a socket here, and limits of 1024 files are common
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        with self._lock:
            try:
                self._running_host()
            except EnvironmentFailure as problem:
                raise RewardError(f"{self.entry}: {problem}") from None

    def open(self) -> "Environment":
        """Starts the environment of one conversation and returns it. Raises EnvironmentFailure if this
        fails."""
        try:
            parent_end, process_end = socket.socketpair()
        except OSError as problem:
            raise EnvironmentFailure(
                f"no socket could be opened for the environment: {problem.strerror}; raise the hard limit of open "
                "files (ulimit -Hn), or hold fewer conversations at once"
            ) from None
        number = next(self._numbers)
        with process_end, self._lock:
            try:
                try:
                    host = self._running_host()
                    host.send_socket({"start": number}, process_end)
                except WorkerLost:  # the host ended between two calls: start another one
                    self._stop_host()
                    host = self._running_host()
                    host.send_socket({"start": number}, process_end)
            except (WorkerLost, EnvironmentFailure) as problem:
                parent_end.close()
                raise EnvironmentFailure(f"the environment's process could not be started: {problem}") from None
        return Environment(self, host, number, Messages(parent_end))

    def end(self, host: WorkerProcess, number: int) -> None:
        """Ends the process of conversation `number`, if the given host process is still in use."""
        with self._lock:
            if host is self._host:
                try:
                    host.send({"stop": number})
                except WorkerLost:
                    self._stop_host()

    def close(self) -> None:
        """Ends all processes. Afterwards `open` fails."""
        self._closed = True
        with self._lock:
            self._stop_host()

    def _running_host(self) -> WorkerProcess:
        if self._closed:
            raise EnvironmentFailure("the run ends, so no environment is started any more")
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
    """The environment of one conversation, in its own process. Its methods raise EnvironmentFailure."""

    def __init__(self, environments: Environments, host: WorkerProcess, number: int, messages: Messages) -> None:
        self._environments, self._host, self._number, self._messages = environments, host, number, messages
        self._lost = False

    def reset(self, prompt: Any, seed: int, columns: Mapping[str, Any]) -> Observation:
        """Starts the conversation and returns the environment's first observation.

        columns: the other fields of the prompt row.
        """
        message = {"reset": {**columns, "prompt": prompt, "seed": seed}}
        return self._call(message, lambda answer: _is_observation(answer, "observation"))["observation"]

    def step(self, completion: str, completion_ids: Sequence[int] = ()) -> Outcome:
        """Gives the model's text to the environment, and returns its observation, reward, and whether it is
        done.

        completion_ids: the text as token ids.
        """
        return Outcome(**self._call({"step": completion, "completion_ids": list(completion_ids)}, _is_outcome))

    def finish(self) -> None:
        """Calls the `close` method of the user's object, unless its process has stopped answering."""
        if not self._lost:
            self._call({"close": True}, lambda answer: not answer)

    def close(self) -> None:
        """Ends the process of this conversation and all processes that it has started."""
        self._messages.close()
        self._environments.end(self._host, self._number)

    def _call(self, message: dict[str, Any], good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Sends a message to the process of this conversation, and returns its answer.

        good: function that returns whether an answer has the right form. Raises EnvironmentFailure if the
            process ends, is late, or reports an exception.
        """
        self._lost = True  # until the process has answered
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
    """Returns whether an answer has exactly these fields, and an observation that is None, a text or
    messages."""
    observation = answer.get("observation")
    is_valid = are_messages(observation) if isinstance(observation, list) else isinstance(observation, str | None)
    return answer.keys() == set(fields) and is_valid


def _is_outcome(answer: dict[str, Any]) -> bool:
    return (
        _is_observation(answer, "observation", "reward", "done")
        and is_reward(answer["reward"])
        and isinstance(answer["done"], bool)
    )
