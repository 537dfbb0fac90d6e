"""A worker process as its parent sees it: started, spoken to in lines of JSON, ended with its descendants."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megatron.process import look_for_stop
from megatron.process.keeper import END

_ROOT = Path(__file__).resolve().parents[3]
_SEND_S = 60.0
_ENDS_S = 30.0  # for a keeper to kill what it keeps
_LOOKS_S = 1.0  # seconds of waiting after which it looks for a stop signal
_LARGEST = 64 << 20  # bytes of a message
# The variables of the run that users' code is given: no tokens, and nothing that tells it that it is a rank.
_PASSED = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM TMPDIR NEOX LD_LIBRARY_PATH LD_PRELOAD VIRTUAL_ENV "
    "CONDA_PREFIX CONDA_DEFAULT_ENV JAVA_HOME NLTK_DATA HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE "
    "HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM TORCH_HOME SSL_CERT_FILE SSL_CERT_DIR "
    "REQUESTS_CA_BUNDLE CURL_CA_BUNDLE SLURM_JOB_ID SLURM_CPUS_PER_TASK SLURM_TMPDIR".split()
)
_PASSED_PREFIXES = ("LC_", "PYTHON", "XDG_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")
_PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})  # in either case


class WorkerLost(Exception):
    """A worker did not answer in time, or has ended; the message says which."""


class Messages:
    """A connection over which both sides send lines of JSON.

    Users' code runs on the other side, and may write to every descriptor that it finds there. So a message
    has an id that nobody can guess, and an answer counts only with it and in the form that is expected."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        self._id = ""

    def send(self, message: dict[str, Any]) -> None:
        """Hand over a message. Raises WorkerLost if the other side has ended or does not read."""
        self.send_json(json.dumps(message).encode())

    def send_json(self, message: bytes) -> None:
        """Hand over a message that is JSON already, an object with a field or more."""
        self._socket.settimeout(_SEND_S)
        try:
            self._socket.sendall(self._with_id(message))
        except OSError:
            raise WorkerLost(self.how_it_ended()) from None

    def receive(self, seconds: float, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next answer to the last message, one that is `good`. Raises WorkerLost if the other side has
        ended, sends none in this time, or sends anything else; StopRequested where a stop signal comes
        first."""
        line = self._line(seconds)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.pop("id", None) != self._id or not good(answer):
            raise WorkerLost(
                f"something wrote {bytes(line[:40])!r} to the connection of its process, where answers are expected; "
                "write to no descriptor that you have not opened"
            )
        return answer

    def _line(self, seconds: float) -> bytes:
        end, looked = time.monotonic() + seconds, 0
        look_for_stop()
        while (line_end := self._received.find(b"\n", looked)) < 0:
            looked = len(self._received)
            if looked > _LARGEST:
                raise WorkerLost(f"its process sent more than {_LARGEST >> 20} MiB as one answer")
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
                raise WorkerLost(self.how_it_ended())
            self._received += part
        line = bytes(self._received[:line_end])
        del self._received[: line_end + 1]
        return line

    def _with_id(self, message: bytes) -> bytes:
        """The line that hands over a message, with an id of its own."""
        self._id = secrets.token_hex(8)
        return b'{"id": "%s", %s\n' % (self._id.encode(), message[1:])

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def how_it_ended(self) -> str:
        """Why the other side answers no more, in words."""
        return "its process ended"


class WorkerProcess(Messages):
    """A process that runs a module of ours, such as `worker.py`. What it prints goes to the parent's stderr;
    it sees no GPU, no rank and no secret."""

    def __init__(self, variables: Collection[str], module: str = "megatron.rollouts.rewards.worker") -> None:
        """variables: names of environment variables that it is given beside the usual ones. The module calls
        `keep_this_process`."""
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],  # -P: not another megatron that lies in this folder
                stdin=theirs.fileno(), stdout=2, env=environment(os.environ, variables),
                start_new_session=True,  # a Ctrl-C reaches the parent alone, which ends it
            )  # fmt: skip

    def send_with(self, message: dict[str, Any], attached: socket.socket) -> None:
        """Hand it a message and a socket."""
        try:
            socket.send_fds(self._socket, [self._with_id(json.dumps(message).encode())], [attached.fileno()])
        except OSError:
            raise WorkerLost(self.how_it_ended()) from None

    def stop(self, grace_s: float = 0.0) -> None:
        """End it, with all that it has started. grace_s: how long it may take to end by itself, as it does
        when its connection is closed."""
        self._socket.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        self._process.send_signal(END)  # its keeper
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def how_it_ended(self) -> str:
        """Its exit code or signal."""
        try:
            code = self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            return "its process closed its connection"
        return f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended ({code})"


def environment(ours: Mapping[str, str], variables: Collection[str] = ()) -> dict[str, str]:
    """What a process that runs users' code is given of our environment: an allow-list, and `variables`."""
    passed = {name: value for name, value in ours.items() if name in variables or _is_passed(name, value)}
    path = os.pathsep.join([str(_ROOT), *filter(None, [ours.get("PYTHONPATH")])])
    return {**passed, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _is_passed(name: str, value: str) -> bool:
    if name.lower() in _PROXIES:
        return "@" not in value  # a password
    return name in _PASSED or name.startswith(_PASSED_PREFIXES)
