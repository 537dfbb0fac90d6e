"""The host process: loads the class of environments and forks a process for each conversation, with a keeper,
so that conversations share nothing, and one that hangs or dies is ended alone, with all that it started.

The host is told by lines of JSON, whose "id" the answer repeats:
{"load": {"file", "name"}}                  is answered by {"problem": null or why}
{"start": number}                           comes with the socket of the conversation
{"stop": number}                            ends the conversation's process and what it started
A conversation's process is told, and answers so or by {"raised": why}:
{"reset": {...}}                            {"observation"}
{"step": text, "completion_ids": [1]}       {"observation", "reward", "done"}
{"close": true}                             {}
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

from megatron.process.keeper import END, keep_this_process
from megatron.rollouts.rewards.calls import NotUsable, load_module, number_of, reason, short
from megatron.rollouts.rewards.worker import ignore_notices, take_connection

_LOOKS_S = 1.0


class Host:
    """The processes of conversations by number."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sockets: list[int] = []  # came, and are not yet a conversation's
        self._processes: dict[int, int] = {}
        self._environment: Any = None

    def serve(self) -> None:
        """Do what the parent asks for until it ends."""
        parent, received = os.getppid(), b""
        while os.getppid() == parent:
            if not select.select([self._connection], [], [], _LOOKS_S)[0]:
                continue
            part, sockets, _, _ = socket.recv_fds(self._connection, 1 << 16, 64)
            for one in sockets:
                os.set_inheritable(one, False)
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
        elif self._sockets:  # none has come where this process has as many files as it may
            self._start(message["start"], self._sockets.pop(0))

    def _load(self, which: dict[str, str]) -> str | None:
        try:
            self._environment = load_environment(which["file"], which["name"])
        except BaseException as problem:  # SystemExit of a script too
            return reason(problem)
        return None

    def _start(self, number: int, its_socket: int) -> None:
        try:
            pid = os.fork()
        except OSError as problem:  # too many processes: the conversation has ended before it began
            print(f"rollout.environment: a conversation cannot be started: {problem.strerror}", file=sys.stderr)
            os.close(its_socket)
            return
        if pid == 0:
            try:
                os.setsid()  # no signal to this process's group is meant for it
                self._connection.close()
                for other in self._sockets:
                    os.close(other)
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
        os.kill(pid, END)  # its keeper; not yet waited for, it is there
        os.waitpid(pid, 0)


def load_environment(file: str, name: str) -> type:
    """A user's class. Raises NotUsable, or what the file raises."""
    found = getattr(load_module(Path(file)), name, None)
    if found is None:
        raise NotUsable(f"{file} has no class {name}")
    for method, form in (("reset", "reset(self, prompt, seed, **columns)"), ("step", "step(self, completion)")):
        if not callable(getattr(found, method, None)):
            raise NotUsable(f"{name} has no method {form}")
    parameters = inspect.signature(found.reset).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        raise NotUsable(f"{name}.reset takes only some columns; declare it as reset(self, prompt, seed, **columns)")
    for method in ("reset", "step", "close"):
        if inspect.iscoroutinefunction(getattr(found, method, None)):
            raise NotUsable(f"{name}.{method} is async; call asyncio.run in it, its process has time to wait")
    return found


def converse(connection: socket.socket, environment: Any) -> None:
    """Be one conversation's environment until the other side ends."""
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
    """Give the conversations of a prompt the same draws; all processes begin as copies of the host."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    with connection.makefile("rb") as lines:
        for line in lines:
            yield json.loads(line)


def _outcome(returned: Any) -> dict[str, Any]:
    """What `step` returned, checked. Raises NotUsable."""
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise NotUsable(f"step returned {short(returned)}, not (observation, reward, done)")
    observation, reward, done = returned
    reward, problem = number_of(reward)
    if problem is not None:
        raise NotUsable(f"as reward step {problem}")
    if observation is None and not done:
        raise NotUsable("step returned no observation, and is not done")
    return {"observation": _observation(observation, "step"), "reward": reward, "done": bool(done)}


def _observation(value: Any, method: str) -> str | list[Any] | None:
    """None, a text, or messages. Raises NotUsable for anything else."""
    if value is None:
        return None
    messages = value if isinstance(value, list) else [{"role": "user", "content": value}]
    good = all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in messages
    )
    if not good:
        raise NotUsable(f"{method} returned {short(value)} as observation, no text or list of messages")
    if method == "step" and any(one["role"] == "assistant" for one in messages):
        raise NotUsable("step returned a message of role assistant, which is the model's")
    for one in messages:
        try:
            one["content"].encode()
        except UnicodeEncodeError:
            problem = f"{method} returned {short(one['content'])}, which is no Unicode"
            raise NotUsable(f"{problem}; decode bytes with errors='replace'") from None
    return value


def main() -> None:
    Host(take_connection()).serve()


if __name__ == "__main__":
    main()
