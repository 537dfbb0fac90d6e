"""Programs that a model wrote, run alone (`sandbox.py`), with their tests in a process beside them
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

_HERE = Path(__file__).parent
_MODULES = {
    f"megatron.rollouts.rewards.{name}": _HERE / f"{name}.py" for name in ("remote_data", "remote_objects", "trial")
}
_CHECK_S = 60.0
_PASSED = b"passed"  # as trial.py reports
_MEMORY, _FILE, _PROCESSES = 1 << 30, 16 << 20, 64  # bytes of each process, of a file; processes together


class NoIsolation(Exception):
    """This machine cannot keep a program from the network and the disks."""


def prepare_programs(hidden: Sequence[str] = ()) -> None:
    """Raises NoIsolation where `run_program` could run none."""
    passed, said = _run("x = 1", "assert x == 1", _CHECK_S, hidden)
    if not passed:
        reason = said.strip() or "Python does not start in it"
        raise NoIsolation(
            f"programs cannot be isolated here ({reason}); it needs Linux 5.14 and namespaces: as a user "
            "user.max_user_namespaces > 0, kernel.apparmor_restrict_unprivileged_userns=0 and a container that "
            "allows unshare and mount, as root CAP_SYS_ADMIN; or leave code out"
        )


def run_program(program: str, tests: str, seconds: float, hidden: Sequence[str] = ()) -> bool:
    """Does it run through, and do its tests, within this time? hidden: folders that it does not see."""
    return _run(program, tests, seconds, hidden)[0]


def _run(program: str, tests: str, seconds: float, hidden: Sequence[str]) -> tuple[bool, str]:
    """Whether the tests came to their end, and what the sandbox said."""
    limits = {
        "CPU": math.ceil(seconds), "AS": _MEMORY, "FSIZE": _FILE, "NPROC": _PROCESSES, "CORE": 0, "NOFILE": 128,
    }  # fmt: skip
    with start_trial(program, tests, limits, sys.executable, hidden) as process:
        try:
            said = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return False, f"took longer than {seconds:g} s"
    return process.returncode == 0 and said == _PASSED, said.decode(errors="replace")


def start_trial(
    program: str, tests: str, limits: dict[str, int], python: str, hidden: Sequence[str] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """The sandbox, which begins. Each of its two processes reads a file of its own, in memory, that no other
    one holds. options: of Popen."""
    sandbox = _HERE.joinpath("sandbox.py").read_text()  # the user that runs it may not be one who may read it
    modules = {name: path.read_text() for name, path in _MODULES.items()}
    told = {"modules": modules, "program": program}
    files = [_in_memory({**told, "entry": "answer"}), _in_memory({**told, "entry": "judge", "tests": tests})]
    try:
        return subprocess.Popen(
            [python, "-I", "-S", "-c", sandbox, str(os.getpid()), json.dumps(limits), *map(str, files), *hidden],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=files, cwd="/",
            env={}, start_new_session=True, **options,
        )  # fmt: skip
    finally:
        for file in files:
            os.close(file)


def _in_memory(told: dict[str, Any]) -> int:
    """A file of JSON that has no name, as a descriptor at its beginning."""
    descriptor = os.memfd_create("trial")
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(json.dumps(told).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
