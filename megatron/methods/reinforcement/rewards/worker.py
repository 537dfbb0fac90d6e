"""The worker process: loads reward functions and calls them, told to by lines of JSON. Each line has an "id",
which its answers repeat: functions share this process, and may write to the connection too.

{"timeout_s": 10}                                        first
{"load": {"file", "name"}, "key"}                        is answered by {"problem": null or why}; a judge
                                                         of pairs is {"judge", "name"}, a verifier of ours
                                                         {"verifier", "hidden"}, with folders
{"completions": [[prompt, completion, ids, columns,
                  messages]]}                            what calls are about from then on; is answered by {}
{"call": key, "rows": [0, 1], "together": true}          is answered by {"judged": [[reward, problem]]} or by
                                                         {"raised": why}; not together: by one for each row
"""

import json
import os
import queue
import signal
import socket
import threading
from functools import partial
from typing import Any

from megatron.methods.reinforcement.rewards.calls import Function, load_file, load_judge, load_verifier, reason
from megatron.process.keeper import keep_this_process

# What a scheduler sends to all processes of a job so that it saves and ends: the rank's matter, with which
# this process ends. Processes that functions start take them as ever.
NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Worker:
    """Answers messages in order, in the process's main thread, because users' code may expect that."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._functions: dict[str, Function] = {}
        self._completions: list[Any] = []
        self._timeout_s = 0.0
        self._id = ""

    def answer(self, message: dict[str, Any]) -> None:
        """Handles a message and sends the answer."""
        self._id = message["id"]
        if "timeout_s" in message:
            self._timeout_s = message["timeout_s"]
        elif "load" in message:
            self._send({"problem": self._load(message["key"], message["load"])})
        elif "completions" in message:
            self._completions = message["completions"]
            self._send({})
        else:
            rows = message["rows"]
            for batch in [rows] if message["together"] else [[row] for row in rows]:
                self._send(self._call(message["call"], [self._completions[row] for row in batch]))

    def _load(self, key: str, function: dict[str, Any]) -> str | None:
        try:
            if "verifier" in function:
                self._functions[key] = load_verifier(function["verifier"], self._timeout_s, function["hidden"])
            elif "judge" in function:
                self._functions[key] = load_judge(function["judge"], function["name"])
            else:
                self._functions[key] = load_file(function["file"], function["name"])
        except BaseException as problem:  # SystemExit of a script too
            return reason(problem)
        return None

    def _call(self, key: str, completions: list[Any]) -> dict[str, Any]:
        try:
            return {"judged": self._functions[key](completions)}
        except BaseException as problem:
            return {"raised": reason(problem)}

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps({**message, "id": self._id}).encode() + b"\n")


def _read(connection: socket.socket, messages: "queue.Queue[dict[str, Any]]") -> None:
    """Puts messages from the connection into the queue.

    Ends this process when the rank ends or closes the connection; its keeper then ends its children."""
    received = []
    while part := connection.recv(1 << 20):
        received.append(part)
        if b"\n" in part:
            *lines, incomplete = b"".join(received).split(b"\n")
            received = [incomplete]
            for line in filter(None, lines):
                messages.put(json.loads(line))
    os._exit(0)


def take_connection() -> socket.socket:
    """Forks a child that goes on, while this process stays as its keeper. Returns the connection on stdin.

    In the child stdin is empty then, and signals of schedulers are ignored. Processes that users' code starts
    inherit neither the connection nor the ignored signals."""
    keep_this_process(lambda: os.close(0))
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    ignore_notices()
    for number in NOTICES:
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))
    return connection


def ignore_notices() -> None:
    """Ignores SIGTERM, SIGUSR1 and SIGUSR2, which schedulers send to all processes of a job."""
    for number in NOTICES:
        signal.signal(number, lambda *_: None)


def main() -> None:
    connection = take_connection()
    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(connection, messages), daemon=True).start()
    worker = Worker(connection)
    while True:
        worker.answer(messages.get())


if __name__ == "__main__":
    main()
