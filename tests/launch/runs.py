"""deepy.py on scripts of a few lines, what became of processes, and programs and servers of tests' own."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEEPY = [sys.executable, str(ROOT / "deepy.py")]
MODEL = {"num_layers": 2, "hidden-size": 8, "num_attention_heads": 2, "seq_length": 8, "max_position_embeddings": 8,
         "train_batch_size": 8, "log_dir": "logs"}  # fmt: skip
SCRIPT = """\
import os, signal, sys, time
from pathlib import Path
rank, start = int(os.environ["RANK"]), int(os.environ.get("NEOX_RESTARTS", 0))

def wait_for(*files):
    while not all(Path(file).exists() for file in files):
        time.sleep(0.01)
"""
PIPED_OUTPUT: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
"""stdout and stderr of a process as one stream."""
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")


def environment(**variables: str) -> dict[str, str]:
    """Returns the environment of somebody who types commands, on CPUs."""
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return {**inherited, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}


def write_script(folder: Path, script: str, keys: Mapping[str, Any] | None = None) -> None:
    (folder / "script.py").write_text(SCRIPT + textwrap.dedent(script))
    (folder / "model.yml").write_text(yaml.safe_dump({**MODEL, **(keys or {})}))


def deepy(folder: Path, script: str, *words: str, disk: int | None = None, ranks: int = 2,
          keys: Mapping[str, Any] | None = None, **run_options: Any) -> "subprocess.CompletedProcess[str]":  # fmt: skip
    """A script on ranks, its streams as one; with a disk of so many kilobytes at `disk`, copied to `kept`."""
    write_script(folder, script, keys)
    command = [*DEEPY, "--num_gpus", str(ranks), "script.py", "model.yml", *words]
    if disk is not None:
        (folder / "disk").mkdir()
        command = [sys.executable, "-m", "tests.disks", str(folder / "disk"), str(disk), str(folder / "kept"), *command]
    return subprocess.run(command, cwd=folder, env=environment(), timeout=200, **{**PIPED_OUTPUT, **run_options})


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def logs_of(folder: Path, ranks: int = 2) -> list[str]:
    return [(folder / "logs" / f"rank_{rank}.log").read_text() for rank in range(ranks)]


@contextmanager
def taken_port(host: str = "127.0.0.1") -> Iterator[int]:
    with socket.socket() as server:
        server.bind((host, 0))
        server.listen()
        yield server.getsockname()[1]


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    """An HTTP server of this machine, which writes nothing."""
    quiet = type(handler.__name__, (handler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), quiet)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
