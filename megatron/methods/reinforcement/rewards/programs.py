"""Runs programs that a model wrote in a sandbox (`sandbox.py`), with their tests in a second process
(`trial.py`)."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_MODULES = {
    f"megatron.methods.reinforcement.rewards.{name}": _FOLDER / f"{name}.py"
    for name in ("remote_data", "remote_objects", "trial")
}
_CHECK_S = 60.0
_PASSED = b"passed"  # the report of trial.py
_MEMORY, _FILE, _PROCESSES = 1 << 30, 16 << 20, 64  # limits: bytes per process, bytes per file, processes


class NoIsolation(Exception):
    """Raised if this machine cannot isolate a program from the network and the disks."""


def prepare_programs(hidden: Sequence[str] = ()) -> None:
    """Checks that the sandbox works, with a trivial program. Raises NoIsolation if it does not.

    hidden: folders that programs may not see.
    """
    passed, output = _run("x = 1", "assert x == 1", _CHECK_S, hidden)
    if not passed:
        reason = output.strip() or "Python does not start in it"
        raise NoIsolation(
            f"programs cannot be isolated here ({reason}); it needs Linux 5.14 or newer with user namespaces. Set "
            "sysctl user.max_user_namespaces > 0 and kernel.apparmor_restrict_unprivileged_userns=0, in a container "
            "that allows unshare and mount; or run as root with CAP_SYS_ADMIN; or do not use the verifier `code`"
        )


def run_program(program: str, tests: str, seconds: float, hidden: Sequence[str] = ()) -> bool:
    """Returns whether a program passes its tests within `seconds`. hidden: folders that the program cannot
    see."""
    return _run(program, tests, seconds, hidden)[0]


def _run(program: str, tests: str, seconds: float, hidden: Sequence[str]) -> tuple[bool, str]:
    """Runs a program and its tests. Returns whether the tests passed, and the sandbox's output or the reason
    of a failure."""
    limits = {
        "CPU": math.ceil(seconds), "AS": _MEMORY, "FSIZE": _FILE, "NPROC": _PROCESSES, "CORE": 0, "NOFILE": 128,
    }  # fmt: skip
    with start_trial(program, tests, limits, sys.executable, hidden) as process:
        try:
            output = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return False, f"took longer than {seconds:g} s"
    return process.returncode == 0 and output == _PASSED, output.decode(errors="replace")


def start_trial(
    program: str, tests: str, limits: dict[str, int], python: str, hidden: Sequence[str] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Starts the sandbox, with one process for the program and one for its tests.

    Each process gets its code in a memory file that the other cannot open. limits: values of RLIMIT_*.
    python: the interpreter. hidden: folders that the program cannot see. options: further arguments of Popen.
    """
    sandbox = _FOLDER.joinpath("sandbox.py").read_text()  # passed as text: the sandbox's user may not read the file
    modules = {name: path.read_text() for name, path in _MODULES.items()}
    common = {"modules": modules, "program": program}
    files = [_in_memory({**common, "entry": "answer"}), _in_memory({**common, "entry": "judge", "tests": tests})]
    try:
        return subprocess.Popen(
            [python, "-I", "-S", "-c", sandbox, str(os.getpid()), json.dumps(limits), *map(str, files), *hidden],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=files, cwd="/",
            env={}, start_new_session=True, **options,
        )  # fmt: skip
    finally:
        for file in files:
            os.close(file)


def _in_memory(content: dict[str, Any]) -> int:
    """Writes `content` as JSON to an anonymous memory file, and returns its file descriptor, set to the
    beginning."""
    descriptor = os.memfd_create("trial")
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(json.dumps(content).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
