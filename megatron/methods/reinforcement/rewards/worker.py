"""The worker process: loads reward functions and calls them, as messages from the rank demand.

Messages are lines of JSON. Each has an "id", which its answers repeat, so that text that functions write to
the connection is not taken for an answer. The messages, and the answers to them:
{"timeout_s": 10}                                        sent first; no answer
{"load": {"file", "name"}, "key"}                        {"problem": null, or why it cannot be used}.
                                                         A pairwise judge is {"judge", "name"}, a built-in
                                                         verifier {"verifier", "hidden": folders}
{"completions": [[prompt, completion, ids, columns,
                  messages]]}                            {}; later calls are about these completions
{"call": key, "rows": [0, 1], "together": true}          {"judged": [[reward, problem]]}, or {"raised":
                                                         reason}; with "together" false, one per row
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

# Signals by which a scheduler asks all processes of a job to save and end. The rank handles them, and this
# process ends with the rank. Processes that functions start handle them as usual.
NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Worker:
    """Answers messages in order, in the process's main thread, because users' code may expect to run
    there."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._functions: dict[str, Function] = {}
        self._completions: list[Any] = []
        self._timeout_s = 0.0
        self._id = ""

    def answer(self, message: dict[str, Any]) -> None:
        """Handles one message and sends the answer to it."""
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

    Ends this process when the rank ends or closes the connection; its keeper then ends its children.
    """
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
    """Forks: the child returns from this call, this process stays behind as its keeper. Returns the
    connection on stdin.

    In the child stdin is then empty, and signals of schedulers are ignored. Processes that users' code starts
    inherit neither the connection nor the ignored signals.
    """
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
