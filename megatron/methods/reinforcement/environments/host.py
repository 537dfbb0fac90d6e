"""The host process loads the user's environment class, and forks a process for each conversation.

Conversations share nothing. If one hangs or dies, its keeper process kills it alone, with all processes that
it has started.

Messages are lines of JSON. Each has a field "id", which the answer repeats. Messages to the host:
{"load": {"file", "name"}}                  answer: {"problem": null, or why the class cannot be used}
{"start": number}                           no answer; comes with the socket of the conversation
{"stop": number}                            no answer; ends the conversation's process and its descendants
Messages to a conversation's process, which may also answer {"raised": "the exception in one line"}:
{"reset": {...}}                            answer: {"observation"}
{"step": text, "completion_ids": [1]}       answer: {"observation", "reward", "done"}
{"close": true}                             answer: {}
"""

import inspect
import json
import os
import random
import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.methods.reinforcement.rewards.calls import NotUsable, load_module, number_of, reason, short
from megatron.methods.reinforcement.rewards.worker import ignore_notices, take_connection
from megatron.process.keeper import END, keep_this_process

_LOOKS_S = 1.0


class Host:
    """Forks a process for each conversation and ends it again, as messages from the parent process demand."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sockets: list[int] = []  # received, but not yet given to a conversation
        self._processes: dict[int, int] = {}
        self._environment: Any = None

    def serve(self) -> None:
        """Handles the parent's messages until the parent process ends."""
        parent, received = os.getppid(), b""
        while os.getppid() == parent:
            if not select.select([self._connection], [], [], _LOOKS_S)[0]:
                continue
            part, sockets, _, _ = socket.recv_fds(self._connection, 1 << 16, 64)
            for descriptor in sockets:
                os.set_inheritable(descriptor, False)
            self._sockets += sockets
            if not part:
                break
            *lines, received = (received + part).split(b"\n")
            for line in lines:
                self._do(json.loads(line))
        for number in list(self._processes):
            self._stop(number)

    def _do(self, message: dict[str, Any]) -> None:
        if "load" in message:
            answer = json.dumps({"problem": self._load(message["load"]), "id": message["id"]})
            self._connection.sendall(answer.encode() + b"\n")
        elif "stop" in message:
            self._stop(message["stop"])
        elif self._sockets:  # no socket is received if this process is at its limit of open files
            self._start(message["start"], self._sockets.pop(0))

    def _load(self, entry: dict[str, str]) -> str | None:
        try:
            self._environment = load_environment(entry["file"], entry["name"])
        except BaseException as problem:  # SystemExit of a script too
            return reason(problem)
        return None

    def _start(self, number: int, its_socket: int) -> None:
        try:
            pid = os.fork()
        except OSError as problem:  # too many processes: the conversation has ended before it began
            print(
                f"rollout.environment: no process can be forked for a conversation: {problem.strerror}; check the "
                "limit of processes (ulimit -u)",
                file=sys.stderr,
            )
            os.close(its_socket)
            return
        if pid == 0:
            try:
                os.setsid()  # keeps signals to the host's process group away
                self._connection.close()
                for descriptor in self._sockets:
                    os.close(descriptor)
                keep_this_process(lambda: os.close(its_socket))
                ignore_notices()
                converse(socket.socket(fileno=its_socket), self._environment)
            finally:
                os._exit(0)
        os.close(its_socket)
        self._processes[number] = pid

    def _stop(self, number: int) -> None:
        pid = self._processes.pop(number, None)
        if pid is None:
            return
        os.kill(pid, END)  # to the keeper; its number is still valid, as nobody has waited for it
        os.waitpid(pid, 0)


def load_environment(file: str, name: str) -> type:
    """Returns the environment class `name` of a user's file.

    Raises NotUsable if the class is missing or lacks a method, and any exception of the file itself.
    """
    environment = getattr(load_module(Path(file)), name, None)
    if environment is None:
        raise NotUsable(f"{file} has no class {name}")
    for method, form in (("reset", "reset(self, prompt, seed, **columns)"), ("step", "step(self, completion)")):
        if not callable(getattr(environment, method, None)):
            raise NotUsable(f"class {name} has no method {form}")
    parameters = inspect.signature(environment.reset).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise NotUsable(f"{name}.reset has no **columns; declare it as reset(self, prompt, seed, **columns)")
    for method in ("reset", "step", "close"):
        if inspect.iscoroutinefunction(getattr(environment, method, None)):
            raise NotUsable(f"{name}.{method} is async; declare it with def, and call asyncio.run inside")
    return environment


def converse(connection: socket.socket, environment: Any) -> None:
    """Runs the environment of one conversation: answers messages until the other side closes the
    connection."""
    instance: Any = None
    with_ids = "completion_ids" in inspect.signature(environment.step).parameters
    for message in _messages(connection):
        answer: dict[str, Any]
        try:
            if "reset" in message:
                _seed(message["reset"]["seed"])
                instance = environment()
                answer = {"observation": _observation(instance.reset(**message["reset"]), "reset")}
            elif "step" in message:
                ids = {"completion_ids": message["completion_ids"]} if with_ids else {}
                answer = _outcome(instance.step(message["step"], **ids))
            else:
                getattr(instance, "close", lambda: None)()
                answer = {}
            line = json.dumps({**answer, "id": message["id"]})
        except BaseException as problem:  # SystemExit too
            line = json.dumps({"raised": reason(problem), "id": message["id"]})
        connection.sendall(line.encode() + b"\n")


def _seed(seed: int) -> None:
    """Seeds random and numpy. Otherwise all conversations would draw the same numbers, as forks of one
    process."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    with connection.makefile("rb") as lines:
        for line in lines:
            yield json.loads(line)


def _outcome(returned: Any) -> dict[str, Any]:
    """Checks what the user's `step` returned, and returns it as JSON fields. Raises NotUsable for a wrong
    form."""
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise NotUsable(f"step returned {short(returned)}, not (observation, reward, done)")
    observation, reward, done = returned
    reward, problem = number_of(reward)
    if problem is not None:
        raise NotUsable(f"step {problem} (as reward); return a finite number or None")
    if observation is None and not done:
        raise NotUsable("step returned no observation, but done is false; return a text, or done=True")
    return {"observation": _observation(observation, "step"), "reward": reward, "done": bool(done)}


def _observation(value: Any, method: str) -> str | list[Any] | None:
    """Returns `value` if it is None, a text or messages; else raises NotUsable.

    method: name of the user's method that returned it, reset or step.
    """
    if value is None:
        return None
    messages = value if isinstance(value, list) else [{"role": "user", "content": value}]
    if not are_messages(messages):
        raise NotUsable(f"{method} returned {short(value)} as observation, not a text, None or a list of messages")
    if method == "step" and any(message["role"] == "assistant" for message in messages):
        raise NotUsable(
            "step returned a message with the role assistant, which is the model's own; use another role, such as user"
        )
    for message in messages:
        try:
            message["content"].encode()
        except UnicodeEncodeError:
            problem = f"{method} returned {short(message['content'])}, which is not valid Unicode"
            raise NotUsable(f"{problem}; decode bytes with errors='replace'") from None
    return value


def are_messages(messages: list[Any]) -> bool:
    """Returns whether all items are messages: dicts with the texts "role" and "content"."""
    return all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )


def main() -> None:
    Host(take_connection()).serve()


if __name__ == "__main__":
    main()
