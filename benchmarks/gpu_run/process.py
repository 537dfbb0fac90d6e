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
    """The result of a part, so far or at its end.

    state: running, passed, failed, cut (by a time limit or a signal) or left out. reason: why it did not
    pass, in one line. tests: one row per ended test, in order. result: content of its RESULT file. log: the
    end of its output, unless it passed. code: digest of its files by `memory.codes`. run: start time of the
    run. code and run are "" in results files of earlier versions.
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
    """Tells all running parts to end once `reason` is not empty; a signal handler sets it."""

    reason: str = ""


def run_part(
    part: Part,
    folder: Path,
    limit_s: float,
    env: Mapping[str, str],
    progress: Callable[[Outcome], None],
    stop: Stop,
) -> Outcome:
    """Runs a part until it ends, the time limit passes, or `stop` has a reason. Returns its outcome.

    folder: the part's own, created here. progress: called about once a second with the results so far. If a
    test crashes its process, another process runs the remaining tests. All child processes are killed at the
    end. Several threads may call this at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (OUTCOMES, RESULT):
        (folder / name).unlink(missing_ok=True)
    command = [sys.executable, *(word.replace("{folder}", str(folder)) for word in part.command)]
    start, status = time.monotonic(), 0

    def look() -> None:
        progress(_so_far(part, folder, start))

    with open(folder / "log", "w", encoding="utf-8") as log:
        for _ in range(_DEAD_TESTS):
            left = limit_s - (time.monotonic() - start)
            status = _follow(command, {**env, **part.env}, log, left, look, stop)
            if not part.tests or status == 0 or not _note_dead_test(folder / OUTCOMES, status):
                break
    outcome = _so_far(part, folder, start)
    reason = stop.reason if status == _STOPPED else f"its {limit_s:.0f} s were up"
    state, reason = _verdict(part, outcome, folder, status, reason)
    tail = "" if state == "passed" else _tail(folder / "log")
    return Outcome(part.name, state, outcome.seconds, reason, outcome.tests, outcome.result, tail)


def _follow(
    command: list[str], env: Mapping[str, str], log: Any, limit_s: float, look: Callable[[], None], stop: Stop
) -> int:
    """Runs a command, and calls `look` about once a second.

    Returns its exit status; _TIME_UP or _STOPPED if it was killed here."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    end, last_look = time.monotonic() + limit_s, time.monotonic()
    try:
        while process.poll() is None:
            if stop.reason:
                return _STOPPED
            if time.monotonic() > end:
                return _TIME_UP
            time.sleep(_POLL_S)
            if time.monotonic() - last_look > 1.0:
                last_look = time.monotonic()
                look()
        return process.returncode
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def _so_far(part: Part, folder: Path, start: float) -> Outcome:
    """Returns the results that the part has written so far."""
    seconds = round(time.monotonic() - start, 1)
    if part.tests:
        rows = [row for row in _rows(folder / OUTCOMES) if row.get("outcome")]
        return Outcome(part.name, _BUSY, seconds, tests=rows)
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result = None
    return Outcome(part.name, _BUSY, seconds, result=result)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a JSONL file. An incomplete last line, of a killed process, is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _note_dead_test(path: Path, status: int) -> bool:
    """Returns whether the test process crashed, so that another one must run the remaining tests.

    The test that was running is then added to the file `path` as failed. status: exit status.
    """
    rows = _rows(path)
    if any("finished" in row for row in rows) or status in (_TIME_UP, _STOPPED) or not rows:
        return False
    ended_tests = {row["name"] for row in rows if row.get("outcome")}
    unfinished = [row["name"] for row in rows if "begun" in row and row["name"] not in ended_tests]
    with open(path, "a", encoding="utf-8") as file:
        for name in unfinished:
            row = {"name": name, "outcome": "failed", "reason": f"its process {_words(status)}"}
            file.write(json.dumps(row) + "\n")
    return True


def _verdict(part: Part, outcome: Outcome, folder: Path, status: int, end_reason: str) -> tuple[str, str]:
    """Returns state and reason of an ended part. end_reason: the reason if `_follow` killed it."""
    failed = [row for row in outcome.tests if row["outcome"] == "failed"]
    if status in (_TIME_UP, _STOPPED):
        rows = _rows(folder / OUTCOMES)
        ended_tests = {row["name"] for row in outcome.tests}
        unfinished = [row["name"] for row in rows if "begun" in row and row["name"] not in ended_tests]
        return "cut", end_reason + (f" in {unfinished[0]}" if unfinished else "")
    if failed:
        return "failed", f"{len(failed)} of {len(outcome.tests)} tests failed"
    if part.tests and not any("finished" in row for row in _rows(folder / OUTCOMES)):
        return "failed", f"its process {_words(status)} before the last test"
    if status != 0:
        return "failed", f"its process {_words(status)}: {_last_line(folder / 'log')}"
    if part.tests and not outcome.tests:
        return "failed", "no test was found"
    if not part.tests and outcome.result is None:
        return "failed", f"it wrote no {RESULT}"
    return "passed", ""


def _words(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"


def _last_line(log: Path) -> str:
    lines = [line for line in _tail(log).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _tail(log: Path) -> str:
    """Returns the end of a log. Paths are made relative, because results files are public."""
    text = log.read_text(encoding="utf-8", errors="replace")
    for folder in (sys.prefix, sys.base_prefix, str(ROOT)):
        text = text.replace(f"{folder}/", "")
    return text[-_LOG_TAIL:]
