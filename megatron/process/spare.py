"""The program of a spare: a process that imports what a rank has imported, and makes ranks of itself.

`megatron.launch.spares` starts it. A rank tells with `report_imports` what a spare has to import.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.process.early_signals import show_stacks_on_signal

IMPORTS = "NEOX_IMPORTS_FILE"
"""The variable that names the file to which a rank writes the modules it has imported."""
FORKS, BECOMES = b"f", b"b"
"""The words of a spare after its imports: it forks a process for each rank, or becomes one itself."""
WAITING = "spare"
"""The name in process lists of a spare that waits."""
# Variables that a rank sets before an import that reads them. Others may be a process's own (WANDB_SERVICE).
_READ_BY_IMPORTS = ("DS_ACCELERATOR",)
# With it torch asks whether there is a GPU without starting CUDA, after which no fork could use one.
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_CUDA_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of cuda.h
_ADOPTION_S = 10.0


def report_imports() -> None:
    """Writes this process's modules and `sys.path` to the file that the launcher asked for, at the first call
    alone. Only the first rank of a machine does so.

    A file that cannot be written is left out: without it a restart only takes longer.
    """
    name = os.environ.pop(IMPORTS, None)
    if name is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    report = {
        "path": sys.path,
        "modules": [module for module in list(sys.modules) if not module.endswith("__main__")],  # those are programs
        "environment": {key: os.environ[key] for key in _READ_BY_IMPORTS if key in os.environ},
    }
    with suppress(OSError):
        partial = Path(f"{name}.tmp")
        partial.write_text(json.dumps(report))
        partial.replace(name)


def wait(script: str, words: Sequence[str], report: Mapping[str, Any], orders: int) -> None:
    """Imports modules, and runs a script as a rank in a fork of this process for each order.

    Where a fork would not work, this process becomes the rank. It tells FORKS or BECOMES after its imports.

    script, words: the command to run. report: from `report_imports`; `sys.path` is the rank's already.
    orders: the descriptor of a socket. An order is a line of JSON with the rank's environment variables; with
        it comes the descriptor for the output of a fork, whose process number is the answer. This process
        becomes the rank if no descriptor comes, and ends if the socket is closed.
    """
    show_stacks_on_signal()
    launcher, connection = os.getppid(), socket.socket(fileno=orders)
    os.environ.update(report["environment"])
    is_set = _ASK_NVML in os.environ
    os.environ.setdefault(_ASK_NVML, "1")
    for module in report["modules"]:
        with suppress(Exception):  # the rank imports again what it needs, and reports what fails
            importlib.import_module(module)
    if not is_set:
        del os.environ[_ASK_NVML]
    gc.freeze()  # a collection in a fork would copy the pages of all objects
    with suppress(OSError):  # the launcher has ended
        connection.sendall(FORKS if _may_fork() else BECOMES)
    _name_process(WAITING)
    while True:
        variables, output = _order(connection)
        if variables is None:
            os._exit(0)
        if output is None or _is_fork(connection, output, launcher):
            break
    connection.close()
    _name_process(Path(sys.executable).name)
    os.environ.update(variables)
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def _order(connection: socket.socket) -> tuple[dict[str, str] | None, int | None]:
    """Returns the next order: environment variables, None at the end; a descriptor for output, or None."""
    line, output = b"", None
    while not line.endswith(b"\n"):
        try:
            part, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        except OSError:
            return None, None
        output = descriptors[0] if descriptors else output
        if not part:
            return None, None
        line += part
    return json.loads(line), output


def _may_fork() -> bool:
    """Returns whether a fork of this process can do all that the process can.

    It cannot if threads run, which a fork would not have, or if CUDA has started.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _CUDA_NOT_INITIALIZED


def _name_process(name: str) -> None:
    if sys.platform == "linux":
        PR_SET_NAME = 15
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def _is_fork(connection: socket.socket, output: int, launcher: int) -> bool:
    """Forks a process that is a child of the launcher, and returns True in it.

    Returns False in this process, after it has told the launcher the number of the child. Between both is a
    process that ends: the launcher then becomes the parent (PR_SET_CHILD_SUBREAPER).
    """
    reader, writer = os.pipe()
    middle_pid = os.fork()
    if middle_pid:
        os.close(writer)
        os.close(output)
        os.waitpid(middle_pid, 0)
        with os.fdopen(reader, "rb") as file:
            connection.sendall(file.read(16) + b"\n")
        return False
    child = os.fork()
    if child:
        os.write(writer, str(child).encode())
        os._exit(0)
    os.setsid()
    os.close(reader)
    os.close(writer)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    deadline = time.monotonic() + _ADOPTION_S
    while os.getppid() != launcher:
        if time.monotonic() > deadline:  # the launcher has ended
            os._exit(1)
        time.sleep(0.001)
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)
    return True
