"""Runs many spoilt inputs of a kind through the program, judges how each ends, and counts."""

import io
import re
import resource
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from megatron.neox_arguments import UserError
from megatron.process.commands import long_name_error
from tests.fuzz.cases import Case, put

LIMIT_S = 20.0
MEMORY = 12 << 30  # of addresses: an input of bytes must not ask for gigabytes
_OBJECT = re.compile(r"<[\w.]+ object at 0x|Traceback \(most recent call last\)")
_MAX_MESSAGE = 20_000


class Refused(Exception):
    """An input was refused, with this message, in a way that is not a UserError: an exit, an HTTP status."""


class Hang(BaseException):
    """Raised in an input that takes longer than LIMIT_S."""


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    cases: spoilt inputs. run: hands the files in a folder to the program; it raises UserError or Refused
    where the program refuses them. base: the files of a valid input; a case holds those that it changes.
    """

    name: str
    cases: SearchStrategy[Case]
    run: Callable[[Path], object]
    base: Callable[[Case], Case] = lambda case: {}


@dataclass
class Counts:
    """How the inputs of a kind ended.

    failures: (smallest case, traceback) by place of the failure. longest_s: seconds of the slowest case.
    """

    num_inputs: int = 0
    succeeded: int = 0
    refused: int = 0
    longest_s: float = 0.0
    slowest: Case = field(default_factory=dict)
    failures: dict[str, tuple[Case, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = f"tried {self.num_inputs:6d}  succeeded {self.succeeded:6d}  refused {self.refused:6d}"
        return f"{counts}  failures {len(self.failures)}  longest {self.longest_s:.1f} s"


def command(main: Callable[[list[str]], Any], *words: object) -> None:
    """Runs a command as typed. Raises Refused with its message if it ends with an error."""
    errors = io.StringIO()
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # refuses text that is not UTF-8, as stdout does
    try:
        with redirect_stdout(terminal), redirect_stderr(errors):
            code = main([str(word) for word in words])
    except SystemExit as ending:
        code = ending.code
    if code:
        raise Refused(code if isinstance(code, str) else errors.getvalue())


def judge(kind: Kind, case: Case, folder: Path) -> tuple[str, str]:
    """Returns (succeeded or refused, ""), or (name of the failure, its traceback), for one input.

    After a refusal the folder must hold the same files as before. Hidden folders may remain, for jobs resume
    there.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    put({**kind.base(case), **case}, folder)
    names = set(folder.rglob("*"))
    try:
        with _limits():
            kind.run(folder)
    except (UserError, Refused, OSError) as refusal:
        line = long_name_error(refusal) if isinstance(refusal, OSError) else None
        if isinstance(refusal, OSError) and line is None:
            return _failure(refusal)
        printed = refusal.error_lines("deepy.py") if isinstance(refusal, UserError) else str(refusal)
        message, new = line or printed, [path for path in set(folder.rglob("*")) - names if _is_output(path)]
        if not (line or str(refusal)).strip() or len(message) > _MAX_MESSAGE or _OBJECT.search(message):
            return f"unclear message: {message[:80]!r}", "".join(traceback.format_exception(refusal))[-4000:]
        if new:
            return "a file is left after a refusal", f"{message}\nleft: {', '.join(map(str, new))}"
        return "refused", ""
    except (Exception, SystemExit, Hang) as problem:
        return _failure(problem)
    return "succeeded", ""


def _is_output(path: Path) -> bool:
    return path.is_file() and not path.parent.name.startswith(".")


def _failure(problem: BaseException) -> tuple[str, str]:
    """Returns the name of a failure by exception and innermost function of the program, and its traceback."""
    frames = traceback.extract_tb(problem.__traceback__)
    program_places = [f"{frame.filename.rpartition('/megatron/')[2]}:{frame.name}" for frame in frames
            if "/megatron/" in frame.filename or "/tools/" in frame.filename]  # fmt: skip
    return f"{type(problem).__name__} at {program_places[-1] if program_places else '?'}", "".join(
        traceback.format_exception(problem)
    )


def fuzz(kind: Kind, examples: int, folder: Path, number: int | None = None) -> Counts:
    """Tries `examples` inputs of a kind and counts how they end.

    number: a seed; None: always the same inputs.
    """
    counts = Counts()

    def attempt(case: Case) -> None:
        begin = time.monotonic()
        verdict, text = judge(kind, case, folder)
        counts.num_inputs += 1
        if time.monotonic() - begin > counts.longest_s:
            counts.longest_s, counts.slowest = time.monotonic() - begin, case
        if verdict in ("succeeded", "refused"):
            setattr(counts, verdict, getattr(counts, verdict) + 1)
        elif verdict not in counts.failures or _size(case) < _size(counts.failures[verdict][0]):
            counts.failures[verdict] = case, text

    limits = settings(
        max_examples=examples, derandomize=number is None, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    test = given(kind.cases)(attempt)
    limits(test if number is None else seed(number)(test))()
    return counts


def _size(case: Case) -> int:
    return sum(len(entry) if isinstance(entry, bytes) else 1 for entry in case.values())


@contextmanager
def _limits() -> Iterator[None]:
    """Raises Hang in this thread after LIMIT_S. Memory above MEMORY cannot be had meanwhile."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Hang(f"longer than {LIMIT_S:g} s")

    thread = threading.main_thread().ident
    timer = threading.Timer(LIMIT_S, lambda: signal.pthread_kill(thread or 0, signal.SIGVTALRM))
    handler = signal.signal(signal.SIGVTALRM, on_signal)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
