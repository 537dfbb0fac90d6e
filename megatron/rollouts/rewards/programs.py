"""Programs that a model wrote, run alone (`sandbox.py`) with tests behind them."""

import json
import math
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

_SANDBOX = Path(__file__).with_name("sandbox.py")
_CHECK_S = 60.0
_MEMORY, _FILE, _PROCESSES = 1 << 30, 16 << 20, 64  # bytes of each process, of a file; processes together


class NoIsolation(Exception):
    """This machine cannot keep a program from the network and the disks."""


def prepare_programs() -> None:
    """Raises NoIsolation where `run_program` could run none."""
    code, said = _run("pass", "pass", _CHECK_S)
    if code != 0:
        reason = said.strip() or "Python does not start in it"
        raise NoIsolation(
            f"programs cannot be isolated here ({reason}); it needs Linux 5.14 and namespaces: as a user "
            "user.max_user_namespaces > 0, kernel.apparmor_restrict_unprivileged_userns=0 and a container that "
            "allows unshare and mount, as root CAP_SYS_ADMIN; or leave code out"
        )


def run_program(program: str, tests: str, seconds: float) -> bool:
    """Does it run through, and its tests after it, within this time?"""
    return _run(program, tests, seconds)[0] == 0


def _run(program: str, tests: str, seconds: float) -> tuple[int, str]:
    """The exit code, 1 for everything but a run to the end of the tests, and what the sandbox said."""
    token = secrets.token_hex(8)  # which is written behind the last test
    limits = {
        "CPU": math.ceil(seconds), "AS": _MEMORY, "FSIZE": _FILE, "NPROC": _PROCESSES, "CORE": 0, "NOFILE": 128,
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SANDBOX), str(os.getpid()), json.dumps(limits)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            told = json.dumps({"program": program, "tests": tests, "token": token}).encode()
            said = process.communicate(told, timeout=seconds)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 1, f"took longer than {seconds:g} s"
    return (0 if process.returncode == 0 and said == token else 1), said
