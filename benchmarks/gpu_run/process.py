"""One part in a process of its own: its time limit, what it has written, and tests that take it down."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_run.parts import OUTCOMES, RESULT, Part

ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.1
_LOG_TAIL = 3000
_BUSY, _DEAD_TESTS = "running", 20  # after so many tests that end their process there is no use in going on
_TIME_UP, _STOPPED = -1001, -1002  # in place of an exit status


@dataclass(frozen=True)
class Outcome:
    """How far a part came. state: running, passed, failed, cut (by a time limit or a signal) or left out.

    reason: why it did not pass, one line. tests: a row for each, as they ended. result: what it measured.
    log: the end of what it printed, where it did not pass. code: digest of the files it ran, as
    `memory.codes` makes it; run: when the command began that ran it; both "" where that is unknown, as in
    tables of before they were noted.
    """

    name: str
    state: str
    seconds: float = 0.0
    reason: str = ""
    tests: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    log: str = ""
    code: str = ""
    run: str = ""


@dataclass
class Stop:
    """Ends all parts that run, once a reason is set; a signal's handler sets it."""

    reason: str = ""


def run_part(
    part: Part,
    folder: Path,
    limit_s: float,
    env: Mapping[str, str],
    progress: Callable[[Outcome], None],
    stop: Stop,
) -> Outcome:
    """Run a part to its end or its time limit; a process that a test takes down is followed by another for
    the tests after it.

    folder: the part's own, made here. progress: told about once a second how far the part has come. stop:
    ends the part as its time limit does. What the part leaves running is ended with it. Several threads may
    each run a part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (OUTCOMES, RESULT):
        (folder / name).unlink(missing_ok=True)
    command = [sys.executable, *(word.replace("{folder}", str(folder)) for word in part.command)]
    begun, status = time.monotonic(), 0

    def look() -> None:
        progress(_so_far(part, folder, begun))

    with open(folder / "log", "w", encoding="utf-8") as log:
        for _ in range(_DEAD_TESTS):
            left = limit_s - (time.monotonic() - begun)
            status = _follow(command, {**env, **part.env}, log, left, look, stop)
            if not part.tests or status == 0 or not _note_dead_test(folder / OUTCOMES, status):
                break
    found = _so_far(part, folder, begun)
    reason = stop.reason if status == _STOPPED else f"its {limit_s:.0f} s were up"
    state, reason = _verdict(part, found, folder, status, reason)
    tail = "" if state == "passed" else _tail(folder / "log")
    return Outcome(part.name, state, found.seconds, reason, found.tests, found.result, tail)


def _follow(
    command: list[str], env: Mapping[str, str], log: Any, limit_s: float, look: Callable[[], None], stop: Stop
) -> int:
    """Exit status of the command; _TIME_UP or _STOPPED where it was ended from here."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    end, looked = time.monotonic() + limit_s, time.monotonic()
    try:
        while process.poll() is None:
            if stop.reason:
                return _STOPPED
            if time.monotonic() > end:
                return _TIME_UP
            time.sleep(_POLL_S)
            if time.monotonic() - looked > 1.0:
                looked = time.monotonic()
                look()
        return process.returncode
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def _so_far(part: Part, folder: Path, begun: float) -> Outcome:
    """What the part has written until now."""
    seconds = round(time.monotonic() - begun, 1)
    if part.tests:
        rows = [row for row in _rows(folder / OUTCOMES) if row.get("outcome")]
        return Outcome(part.name, _BUSY, seconds, tests=rows)
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result = None
    return Outcome(part.name, _BUSY, seconds, result=result)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines; a process may have been ended within its last."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _note_dead_test(path: Path, status: int) -> bool:
    """Whether tests are left that another process should run: this one ended before its last. A test that had
    begun and did not end is noted as failed."""
    rows = _rows(path)
    if any("finished" in row for row in rows) or status in (_TIME_UP, _STOPPED) or not rows:
        return False
    ended = {row["name"] for row in rows if row.get("outcome")}
    begun = [row["name"] for row in rows if "begun" in row and row["name"] not in ended]
    with open(path, "a", encoding="utf-8") as file:
        for name in begun:
            row = {"name": name, "outcome": "failed", "reason": f"its process {_words(status)}"}
            file.write(json.dumps(row) + "\n")
    return True


def _verdict(part: Part, found: Outcome, folder: Path, status: int, cut: str) -> tuple[str, str]:
    """State and reason of a part that has ended. cut: why, where it was ended from here."""
    failed = [row for row in found.tests if row["outcome"] == "failed"]
    if status in (_TIME_UP, _STOPPED):
        rows = _rows(folder / OUTCOMES)
        ended = {row["name"] for row in found.tests}
        within = [row["name"] for row in rows if "begun" in row and row["name"] not in ended]
        return "cut", cut + (f" in {within[0]}" if within else "")
    if failed:
        return "failed", f"{len(failed)} of {len(found.tests)} tests failed"
    if part.tests and not any("finished" in row for row in _rows(folder / OUTCOMES)):
        return "failed", f"its process {_words(status)} before the last test"
    if status != 0:
        return "failed", f"its process {_words(status)}: {_last_line(folder / 'log')}"
    if part.tests and not found.tests:
        return "failed", "no test was found"
    if not part.tests and found.result is None:
        return "failed", f"it wrote no {RESULT}"
    return "passed", ""


def _words(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"


def _last_line(log: Path) -> str:
    lines = [line for line in _tail(log).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]
