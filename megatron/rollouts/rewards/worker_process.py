"""A worker process as its parent sees it: started, spoken to in lines of JSON, ended with its children."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
_SEND_S = 60.0
# What tells a process that it is a rank of a run, and where the others are.
_RANK = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "NODE_RANK", "MASTER_", "TORCHELASTIC_", "NCCL_", "OMPI_",
         "PMI_", "PMIX_", "SLURM_PROCID", "SLURM_LOCALID")  # fmt: skip


class WorkerLost(Exception):
    """A worker did not answer in time, or has ended; the message says which."""


class Messages:
    """A connection over which both sides send lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = b""

    def send(self, message: dict[str, Any]) -> None:
        """Hand over a message. Raises WorkerLost if the other side has ended or does not read."""
        self.send_line(json.dumps(message).encode() + b"\n")

    def send_line(self, line: bytes) -> None:
        """Hand over a message that is JSON already."""
        self._socket.settimeout(_SEND_S)
        try:
            self._socket.sendall(line)
        except OSError:
            raise WorkerLost(self.how_it_ended()) from None

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next message. Raises WorkerLost if the other side has ended, or sends none in this time."""
        end = time.monotonic() + seconds
        while b"\n" not in self._received:
            try:
                self._socket.settimeout(max(1e-3, end - time.monotonic()))
                part = self._socket.recv(1 << 20)
            except TimeoutError:
                raise WorkerLost(f"took longer than {seconds:g} s") from None
            except OSError:
                part = b""
            if not part:
                raise WorkerLost(self.how_it_ended())
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def how_it_ended(self) -> str:
        """Why the other side answers no more, in words."""
        return "its process ended"


class WorkerProcess(Messages):
    """A process that runs a module of ours, such as `worker.py`. What it prints goes to the parent's stderr;
    it sees no GPU and no rank."""

    def __init__(self, module: str = "megatron.rollouts.rewards.worker") -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],  # -P: not another megatron that lies in this folder
                stdin=theirs.fileno(), stdout=2, env=_environment(),
                start_new_session=True,  # a Ctrl-C reaches the parent alone, which ends it with its children
            )  # fmt: skip

    def send_with(self, message: dict[str, Any], attached: socket.socket) -> None:
        """Hand it a message and a socket."""
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode() + b"\n"], [attached.fileno()])
        except OSError:
            raise WorkerLost(self.how_it_ended()) from None

    def stop(self, grace_s: float = 0.0) -> None:
        """End it, with the processes of its group. grace_s: how long it may take to end by itself, as it does
        when its connection is closed."""
        self._socket.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def how_it_ended(self) -> str:
        """Its exit code or signal."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "its process closed its connection"
        return f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended ({code})"


def _environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_RANK)}
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**ours, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
