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
    files = (_own_file(module) for module in list(sys.modules.values()))
    report = {
        "path": sys.path,
        "modules": [module for module in list(sys.modules) if not module.endswith("__main__")],  # those are programs
        "files": [file for file in files if file is not None],
        "environment": {key: os.environ[key] for key in _READ_BY_IMPORTS if key in os.environ},
    }
    with suppress(OSError):
        partial = Path(f"{name}.tmp")
        partial.write_text(json.dumps(report))
        partial.replace(name)


def _own_file(module: Any) -> str | None:
    """Returns the file of a module that is neither installed nor of Python; None for others."""
    file = getattr(module, "__file__", None)
    is_installed = file is None or str(file).startswith((sys.prefix, sys.base_prefix, sys.exec_prefix))
    return None if is_installed else str(file)


def wait(script: str, words: Sequence[str], report: Mapping[str, Any], orders: int) -> None:
    """Imports modules, and runs a script as a rank in a fork of this process for each order.

    Where a fork would not work, this process becomes the rank. It tells FORKS or BECOMES after its imports.

    script, words: the command to run. report: from `report_imports`; `sys.path` is the rank's already.
    orders: the descriptor of a socket. An order is a line of JSON with the rank's environment variables, null
        for those to be removed. With it come descriptors for a fork, whose process number is the answer: for
        its output, and one from which it reads a byte before it begins. This process becomes the rank if none
        come, and ends if the socket is closed.
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
        variables, descriptors = _order(connection)
        if variables is None:
            os._exit(0)
        if not descriptors or _is_fork(connection, descriptors[0], descriptors[1], launcher):
            break
    connection.close()
    _name_process(Path(sys.executable).name)
    for name, text in variables.items():
        os.environ.pop(name, None)
        if text is not None:
            os.environ[name] = text
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # forks would have equal random numbers
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def _order(connection: socket.socket) -> tuple[dict[str, str | None] | None, list[int]]:
    """Returns the next order: environment variables, None at the end; and the descriptors that came with
    it."""
    line, received = b"", list[int]()
    while not line.endswith(b"\n"):
        try:
            part, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        except OSError:
            return None, []
        received += descriptors
        if not part:
            return None, []
        line += part
    return json.loads(line), received


def _may_fork() -> bool:
    """Returns whether a fork of this process can do all that the process can.

    It cannot if threads run, which a fork would not have, or if CUDA has started. Of HIP that cannot be told.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    if (torch := sys.modules.get("torch")) is not None and torch.version.hip is not None:
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


def _is_fork(connection: socket.socket, output: int, go_ahead: int, launcher: int) -> bool:
    """Forks a process that is a child of the launcher, and returns True in it.

    Returns False in this process, after it has told the launcher the number of the child. Between both is a
    process that ends: the launcher then becomes the parent (PR_SET_CHILD_SUBREAPER).
    """
    reader, writer = os.pipe()
    middle_pid = os.fork()
    if middle_pid:
        os.close(writer)
        os.close(output)
        os.close(go_ahead)
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
    if os.getppid() != launcher or not os.read(go_ahead, 1):
        os._exit(1)
    os.close(go_ahead)
    return True
