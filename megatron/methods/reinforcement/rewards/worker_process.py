"""Starts worker processes, exchanges lines of JSON with them, and ends them with their descendants."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.process import look_for_stop
from megatron.process.keeper import END

_ROOT = Path(__file__).resolve().parents[3]
_SEND_S = 60.0
_ENDS_S = 30.0  # time limit for a keeper to kill its processes
_LOOKS_S = 1.0  # seconds of waiting between looks for a stop signal
_LARGEST = 64 << 20  # largest message, in bytes
# Environment variables that users' code gets from the run. They hold no secrets, and nothing about ranks.
_PASSED = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM TMPDIR NEOX LD_LIBRARY_PATH LD_PRELOAD VIRTUAL_ENV "
    "CONDA_PREFIX CONDA_DEFAULT_ENV JAVA_HOME NLTK_DATA HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE "
    "HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM TORCH_HOME SSL_CERT_FILE SSL_CERT_DIR "
    "REQUESTS_CA_BUNDLE CURL_CA_BUNDLE SLURM_JOB_ID SLURM_CPUS_PER_TASK SLURM_TMPDIR".split()
)
_PASSED_PREFIXES = ("LC_", "PYTHON", "XDG_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")
_PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})  # in either case


class WorkerLost(Exception):
    """Raised if a worker process ended, or did not answer correctly in time; the message says why."""


class Messages:
    """A connection that carries lines of JSON in both directions.

    Users' code in the other process could write to it too. So each message has a random id, and an answer is
    accepted only if it has this id and the expected form.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        self._id = ""

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. Raises WorkerLost if the other side has ended or does not read."""
        self.send_json(json.dumps(message).encode())

    def send_json(self, message: bytes) -> None:
        """Sends a message that is JSON already: an object with at least one field. Raises WorkerLost if this
        fails."""
        self._socket.settimeout(_SEND_S)
        try:
            self._socket.sendall(self._with_id(message))
        except OSError:
            raise WorkerLost(self.ending()) from None

    def receive(self, seconds: float, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Waits up to `seconds` for the answer to the last message, and returns it.

        good: function that returns whether an answer has the right form. Raises WorkerLost if the other side
            ends, is late, or sends something else, and StopRequested if a stop signal arrives.
        """
        line = self._line(seconds)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.pop("id", None) != self._id or not good(answer):
            raise WorkerLost(
                f"its process sent {bytes(line[:40])!r}, which is no valid answer: user code has written to the socket "
                "for answers; let it write only to file descriptors that it opened itself"
            )
        return answer

    def _line(self, seconds: float) -> bytes:
        end, searched = time.monotonic() + seconds, 0
        look_for_stop()
        while (line_end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if searched > _LARGEST:
                raise WorkerLost(f"its process sent an answer of more than {_LARGEST >> 20} MiB, the limit")
            look_for_stop()
            try:
                self._socket.settimeout(min(_LOOKS_S, max(1e-3, end - time.monotonic())))
                part = self._socket.recv(1 << 20)
            except TimeoutError:
                if time.monotonic() < end:
                    continue
                raise WorkerLost(f"took longer than {seconds:g} s") from None
            except OSError:
                part = b""
            if not part:
                raise WorkerLost(self.ending())
            self._received += part
        line = bytes(self._received[:line_end])
        del self._received[: line_end + 1]
        return line

    def _with_id(self, message: bytes) -> bytes:
        """Gives a JSON message a new random id, and returns it as a line."""
        self._id = secrets.token_hex(8)
        return b'{"id": "%s", %s\n' % (self._id.encode(), message[1:])

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def ending(self) -> str:
        """Returns a text that says why the other side does not answer any more."""
        return "its process ended"


class WorkerProcess(Messages):
    """A child process that runs a module of this package, such as `worker.py`.

    Its output goes to the parent's stderr. Its environment has no GPU, no rank variables and no secrets.
    """

    def __init__(
        self, variables: Collection[str], module: str = "megatron.methods.reinforcement.rewards.worker"
    ) -> None:
        """Starts the process.

        variables: names of environment variables that the process gets besides the usual ones.
        module: the module to run in the process; it must call `keep_this_process`.
        """
        parent_end, worker_end = socket.socketpair()
        super().__init__(parent_end)
        with worker_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],  # -P: do not import another megatron from this folder
                stdin=worker_end.fileno(), stdout=2, env=environment(os.environ, variables),
                start_new_session=True,  # Ctrl-C then reaches only the parent, which ends this process
            )  # fmt: skip

    def send_socket(self, message: dict[str, Any], attached: socket.socket) -> None:
        """Sends a message together with the file descriptor of a socket. Raises WorkerLost if this fails."""
        try:
            socket.send_fds(self._socket, [self._with_id(json.dumps(message).encode())], [attached.fileno()])
        except OSError:
            raise WorkerLost(self.ending()) from None

    def stop(self, grace_s: float = 0.0) -> None:
        """Closes the connection, and ends the process and its descendants.

        grace_s: seconds that the process may take to end by itself first.
        """
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._process.send_signal(END)  # the keeper then kills the process and its descendants
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ending(self) -> str:
        """Returns a text that says how the process ended: its exit code or signal."""
        try:
            code = self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            return "its process closed the connection, but still runs"
        return (
            f"its process was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"its process ended with exit code {code}"
        )


def environment(parent_variables: Mapping[str, str], variables: Collection[str] = ()) -> dict[str, str]:
    """Returns the environment variables for a process that runs users' code: an allow-list, and `variables`.

    parent_variables: the variables of this process. variables: names to pass besides the allow-list.
    """
    passed = {name: value for name, value in parent_variables.items() if name in variables or _is_passed(name, value)}
    path = os.pathsep.join([str(_ROOT), *filter(None, [parent_variables.get("PYTHONPATH")])])
    return {**passed, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _is_passed(name: str, value: str) -> bool:
    if name.lower() in _PROXIES:
        return "@" not in value  # an address with "@" holds a password
    return name in _PASSED or name.startswith(_PASSED_PREFIXES)
