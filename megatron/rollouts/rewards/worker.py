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

from megatron.process.keeper import keep_this_process
from megatron.rollouts.rewards.calls import Function, load_file, load_judge, load_verifier, reason

# What a scheduler sends to all processes of a job so that it saves and ends: the rank's matter, with which
# this process ends. Processes that functions start take them as ever.
NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Worker:
    """Answers messages one after the other, in the process's main thread as user's code may expect it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._functions: dict[str, Function] = {}
        self._completions: list[Any] = []
        self._timeout_s = 0.0
        self._id = ""

    def answer(self, message: dict[str, Any]) -> None:
        """Do what a message asks for."""
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
            for some in [rows] if message["together"] else [[row] for row in rows]:
                self._send(self._call(message["call"], [self._completions[row] for row in some]))

    def _load(self, key: str, which: dict[str, Any]) -> str | None:
        try:
            if "verifier" in which:
                self._functions[key] = load_verifier(which["verifier"], self._timeout_s, which["hidden"])
            elif "judge" in which:
                self._functions[key] = load_judge(which["judge"], which["name"])
            else:
                self._functions[key] = load_file(which["file"], which["name"])
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
    """Fill the queue; end this process when the rank has ended, or has closed the connection. Its keeper ends
    what it has started."""
    received = []
    while part := connection.recv(1 << 20):
        received.append(part)
        if b"\n" in part:
            *lines, rest = b"".join(received).split(b"\n")
            received = [rest]
            for line in filter(None, lines):
                messages.put(json.loads(line))
    os._exit(0)


def take_connection() -> socket.socket:
    """The connection to the rank, which is this process's stdin, in a child that is kept; it is not handed to
    processes that users' code starts, and neither are the notices of schedulers ignored there."""
    keep_this_process(lambda: os.close(0))
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    ignore_notices()
    for number in NOTICES:
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))
    return connection


def ignore_notices() -> None:
    """Go on when a scheduler tells all processes of a job to save and end."""
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
