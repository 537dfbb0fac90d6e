"""Reads progress, phase and errors from the log of a job. Logs may have gigabytes, so only begin and end are
read.

A crash is a line with `traceback`, `exception` or `error:` among the last 100 lines. Progress is read from
the line that GPT-NeoX logs for an iteration.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.process.run_files import open_file, text

LAST_LINES = 100
CRASH = re.compile(r"traceback|exception|error:", re.IGNORECASE)
ITERATION = re.compile(
    rb"iteration +(\d{1,18})/ *(\d{1,18}) \|(?:.*?elapsed time per iteration \(ms\): (\d{1,15}(?:\.\d+)?)\b)?"
    rb".*?lm_loss: (\S+)"
)
# slurmstepd writes this line for a job that is requeued and continues: not a crash
_REQUEUED = re.compile(r"^slurmstepd: error: \*\*\* .* DUE TO JOB REQUEUE \*\*\*")
_MAX_ERROR_LINES = 3
_WIDTH = 300  # characters of an error line
_TAIL = 256 * 1024  # bytes at the end of a log that are always read
_SEARCHED = 16 * 1024 * 1024  # most bytes at the end of a log that are searched
_HEAD = 1024 * 1024  # bytes at the begin of a log, which has the list of arguments
# Patterns of lines that show a run's phase; the last match in a log counts.
_PHASES = (
    ("starting", rb"^-+ arguments -+$|^deepy\.py: restart \d+ of \d+ |^pretrain_neox\.sbatch: saved; job "),
    ("saving", rb"^still saving"),
    ("evaluating", rb"^Running evaluation harness|^still (?:evaluating|computing the|answering demo)"),
    ("ended", rb"^run (?:finished|stopped|failed) at iteration|^nothing left to do: train_iters is"),
    (
        "training",
        rb"iteration +\d+/ *\d+ \||^ (?:validation|test|evaluation)[^ ]* results at iteration |^saved checkpoint ",
    ),
)
_PHASE = re.compile(b"|".join(b"(?P<%s>%s)" % (name.encode(), pattern) for name, pattern in _PHASES), re.MULTILINE)
_SUBMITTED = re.compile(rb"^Submitted batch job (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Progress:
    """The last iteration that a log shows.

    total: the run's `train_iters`. seconds: seconds per iteration, a mean over up to 20 logged lines."""

    iteration: int
    total: int
    loss: float
    seconds: float | None


@dataclass(frozen=True)
class LogFacts:
    """The facts read from the log of a job.

    written: time of the last write, in seconds since 1970.
    error_lines: up to three lines that mention an error, from the log's last 100 lines.
    phase: starting, training, evaluating, saving or ended.
    save, log_dir: the run's folders, from the list of arguments in the log.
    submitted: number of the job that this job submitted as its successor.
    """

    written: float
    progress: Progress | None = None
    error_lines: tuple[str, ...] = ()
    phase: str = "starting"
    save: str | None = None
    log_dir: str | None = None
    submitted: str | None = None


def read_log(path: Path) -> LogFacts | None:
    """Returns the facts in the log of a job; None if the file does not exist (yet) or cannot be read."""
    try:
        written = path.stat().st_mtime
        with open_file(path) as file:
            head = file.read(_HEAD)
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            tail = file.read(_TAIL)
        arguments = {name: _argument(head, name) for name in ("save", "log_dir")}
        submitted = _SUBMITTED.findall(tail)
        return LogFacts(
            written, _progress(path, tail), error_lines(last_lines(path)), _phase(tail), **arguments,
            submitted=submitted[-1].decode() if submitted else None,
        )  # fmt: skip
    except OSError:
        return None


def last_lines(path: Path, count: int = LAST_LINES) -> list[str]:
    """Returns the last `count` lines of a file, without newlines; less if lines are longer than 16 MiB
    together."""
    data = _read_backwards(path, lambda data: data.count(b"\n") > count)
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    return [line.decode(errors="replace") for line in lines[-count:]]


def follow(
    path: Path, is_active: Callable[[], bool], pause_s: float = 1.0, check_every_s: float = 10.0
) -> Iterator[str]:
    """Yields the text that is appended to a file from now on, until the job that writes it has ended.

    is_active: returns whether the job still runs; called every `check_every_s` seconds. Once it returns
    False, the rest of the file is yielded.
    """
    with open_file(path) as file:
        file.seek(0, 2)
        last_check, finished = time.monotonic(), False
        while True:
            if data := file.read():
                yield data.decode(errors="replace")
            elif finished:
                return
            else:
                time.sleep(pause_s)
                if time.monotonic() - last_check >= check_every_s:
                    last_check, finished = time.monotonic(), not is_active()


def error_lines(lines: list[str]) -> tuple[str, ...]:
    """Returns the last three of the lines that contain `traceback`, `exception` or `error:`, shortened."""
    errors = [text(line.strip()[:_WIDTH]) for line in lines if CRASH.search(line) and not _REQUEUED.search(line)]
    return tuple(errors[-_MAX_ERROR_LINES:])


def _progress(path: Path, tail: bytes) -> Progress | None:
    matches = list(ITERATION.finditer(tail))
    if not matches:  # an evaluation may have written many lines after the last iteration
        matches = list(ITERATION.finditer(_read_backwards(path, ITERATION.search)))
    if not matches:
        return None
    iteration, total, _, loss = matches[-1].groups()
    seconds = [float(match[3]) / 1000.0 for match in matches[-20:] if match[3] is not None]
    try:
        value = float(loss)
    except ValueError:  # the line is not written completely yet
        value = float("nan")
    return Progress(int(iteration), int(total), value, sum(seconds) / len(seconds) if seconds else None)


def _phase(tail: bytes) -> str:
    phase = "starting"
    for match in _PHASE.finditer(tail.replace(b"\r", b"\n")):
        phase = match.lastgroup or phase
    return phase


def _argument(head: bytes, name: str) -> str | None:
    """Returns the value of an argument in the list of arguments that begins a log; None if it is not
    listed."""
    match = re.search(rb"^  %s \.+ (.*?)\.*(?:updated|default)\s*$" % name.encode(), head, re.MULTILINE)
    return match[1].decode(errors="replace") if match is not None and match[1] != b"None" else None


def _read_backwards(path: Path, is_enough: Callable[[bytes], object]) -> bytes:
    """Returns so much of the end of a file that `is_enough` is true for it, but about 16 MiB at most.

    Reads blocks backwards from the end; each is twice as long as the block after it.
    """
    data, block = b"", 64 * 1024
    with open_file(path) as file:
        start = file.seek(0, 2)
        # Progress bars may fill gigabytes without a newline.
        while start > 0 and len(data) < _SEARCHED and not is_enough(data):
            end, start = start, max(0, start - block)
            file.seek(start)
            data, block = file.read(end - start) + data, 2 * block
    return data
