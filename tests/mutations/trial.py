"""Runs the tests for one mistake, nearest first, until one fails."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from tests.import_graph import ImportGraph
from tests.mutations.copies import Copy
from tests.mutations.ledger import ALIVE, ALIVE_NEAR, CAUGHT, Row
from tests.mutations.mistakes import Mistake
from tests.selection import TEST_FILE

ORDINARY, LONGER, ALL = "cpu and not more", "more", "cpu or more"  # the last as .ci/run
NEAREST, NEAR_FILES = 8, 32
LIMIT = 7200.0  # seconds of one process of pytest, in which every test has a limit of its own
TRIAL_VARIABLE = "NEOX_MUTATION_TRIAL"  # environment variable by which processes that a test left behind are known
FAILURE = re.compile(r"^(FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)
PASSED = re.compile(r"\b(\d+) passed\b")
NOT_FOUND, NO_TESTS = 4, 5  # pytest's exit codes


class PytestError(Exception):
    """Pytest ended, but by no test."""


@dataclass(frozen=True)
class Run:
    """One process of pytest.

    code: its exit code, None where the time was up. failure: what pytest names: a test, or a file that could
    not be collected.
    """

    code: int | None
    passed: int
    failure: str
    output: str


@dataclass
class Runner:
    """limit: seconds of one process of pytest. near_only: leave out all but the nearest files."""

    copy: Copy
    commit: str
    limit: float = LIMIT
    near_only: bool = False
    interrupted: bool = False
    _trial_id: str = ""

    def end(self) -> None:
        """Kill what runs, and run nothing more."""
        self.interrupted = True
        if self._trial_id:
            _end_all(self._trial_id)

    def try_out(self, mistake: Mistake, first_tests: Sequence[str] = ()) -> Row:
        """Runs tests against a mistake. Raises NoLongerApplies, and PytestError where pytest itself fails.

        first_tests: tests or files to begin with, where they are still there: what caught it the last
        time. A test that fails as well without the mistake counts for nothing: it is left out, and the others
        go on.
        """
        begin, passed = time.monotonic(), 0
        excluded: list[str] = []
        result, test, ending = ALIVE_NEAR if self.near_only else ALIVE, "", ""
        known_tests = [name for name in first_tests if (self.copy.root / name.partition("::")[0]).exists()]
        waiting = [(known_tests, ALL), *_chunks(self._tests(mistake), self.near_only)][::-1]
        while waiting:
            chunk, marks = waiting.pop()
            if not chunk:
                continue
            with self.copy.with_mistake(mistake):
                run = self._pytest([*chunk, "-m", marks, *(f"--deselect={name}" for name in excluded)])
            if run.code in (0, NO_TESTS) or (chunk is known_tests and run.code == NOT_FOUND):
                passed += run.passed
                continue
            test, ending = _ending(run, chunk)
            if ending in ("failed", "not collected") and not self._passes_unmutated(test):
                excluded.append(test)
                if ending == "not collected":
                    chunk = [file for file in chunk if file != test]
                waiting.append((chunk, marks))
                continue
            result, passed = CAUGHT, passed + run.passed
            break
        else:
            test = ending = ""
        seconds = round(time.monotonic() - begin)
        return Row(mistake.name, result, test, ending, passed, seconds, self.commit, mistake.digest)

    @cached_property
    def _graph(self) -> ImportGraph:
        self.copy.restore()
        return ImportGraph.of(self.copy.root)

    def _tests(self, mistake: Mistake) -> list[str]:
        """Test files that depend on the changed file, those of its own room and the nearest first."""
        changed = _file(self.copy, mistake)
        room, steps = PurePosixPath(changed).parts[1], self._graph.dependents([changed])
        files = [path for path in steps if TEST_FILE.fullmatch(path)]
        return sorted(files, key=lambda path: (PurePosixPath(path).parts[1] != room, steps[path], path))

    def _passes_unmutated(self, test: str) -> bool:
        self.copy.restore()
        return self._pytest([test, "-m", ALL]).code in (0, NO_TESTS)

    def _pytest(self, arguments: Sequence[str]) -> Run:
        self._trial_id = str(uuid.uuid4())
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.copy.root),
            "COLUMNS": "400",
            TRIAL_VARIABLE: self._trial_id,
        }
        words = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *arguments]
        with tempfile.TemporaryFile() as file:  # a pipe would stay open as long as what pytest started
            process = subprocess.Popen(
                words, cwd=self.copy.root, env=environment, start_new_session=True, stdout=file, stderr=file
            )
            code: int | None = None
            try:
                code = process.wait(self.limit)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end_all(self._trial_id)
                process.wait()
            file.seek(0)
            output = file.read().decode(errors="replace")
        if self.interrupted:
            raise PytestError("it was interrupted")
        failure, passed = FAILURE.search(output), PASSED.findall(output)
        return Run(code, int(passed[-1]) if passed else 0, failure.group(2) if failure else "", output)


def _file(copy: Copy, mistake: Mistake) -> str:
    with copy.with_mistake(mistake) as path:
        return path


def _chunks(files: Sequence[str], near_only: bool) -> list[tuple[list[str], str]]:
    """Files and marks of each process of pytest: what is near and short first."""
    closest, near_files, far_files = list(files[:NEAREST]), list(files[NEAREST:NEAR_FILES]), list(files[NEAR_FILES:])
    first_chunks = [(closest, ORDINARY), (near_files, ORDINARY)]
    return first_chunks if near_only else [*first_chunks, ([*closest, *near_files], LONGER), (far_files, ALL)]


def _ending(run: Run, chunk: Sequence[str]) -> tuple[str, str]:
    """The test that ended a run, and how. Raises PytestError where it was none."""
    if run.code is None:
        return chunk[0], "hung"
    if run.code < 0:
        return chunk[0], "crashed"
    if not run.failure:
        raise PytestError(f"pytest ended with {run.code}:\n{run.output[-2000:]}")
    return run.failure, "failed" if "::" in run.failure else "not collected"


def _end_all(trial_id: str) -> None:
    """Kills what a run of pytest started and did not end: ranks and servers are in sessions of their own."""
    word = f"{TRIAL_VARIABLE}={trial_id}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if word in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
