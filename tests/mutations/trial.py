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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePosixPath

from tests.import_graph import ImportGraph
from tests.mutations.copies import Copy
from tests.mutations.ledger import ALIVE, CAUGHT, NEAR, Row
from tests.mutations.mistakes import Mistake
from tests.selection import TEST_FILE

ARGUMENTS = ("-m", "cpu or more")  # as .ci/run
CHUNKS = (8, 24)  # files of the first processes of pytest; the rest is one
LIMIT = 7200.0  # seconds of one process of pytest, in which every test has a limit of its own
TOLD = "NEOX_MUTATION_TRIAL"  # environment variable by which processes that a test left behind are known
FAILURE = re.compile(r"^(FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)
PASSED = re.compile(r"\b(\d+) passed\b")
NO_TESTS = 5  # pytest's exit code


class PytestError(Exception):
    """Pytest ended, but by no test."""


@dataclass(frozen=True)
class Run:
    """One process of pytest. code: its exit code, None where the time was up. failure: what pytest names: a
    test, or a file that could not be collected."""

    code: int | None
    passed: int
    failure: str
    output: str


@dataclass
class Runner:
    """limit: seconds of one process of pytest. near: leave out all but the nearest files."""

    copy: Copy
    commit: str
    limit: float = LIMIT
    near: bool = False
    ended: bool = False
    _told: str = ""

    def end(self) -> None:
        """Kill what runs, and run nothing more."""
        self.ended = True
        if self._told:
            _end_all(self._told)

    def try_out(self, mistake: Mistake) -> Row:
        """What becomes of a mistake. Raises NoLongerApplies, and PytestError where pytest itself fails.

        A test that fails as well without the mistake counts for nothing: it is left out, and the others go
        on.
        """
        begin, passed = time.monotonic(), 0
        excluded: list[str] = []
        result, test, how = NEAR if self.near else ALIVE, "", ""
        chunks = list(_chunks(self._tests(mistake)))[: len(CHUNKS) if self.near else None]
        waiting = chunks[::-1]
        while waiting:
            if not (chunk := waiting.pop()):
                continue
            with self.copy.with_mistake(mistake):
                run = self._pytest([*chunk, *ARGUMENTS, *(f"--deselect={name}" for name in excluded)])
            if run.code in (0, NO_TESTS):
                passed += run.passed
                continue
            test, how = _ending(run, chunk)
            if how in ("failed", "not collected") and not self._passes_without(test):
                excluded.append(test)
                if how == "not collected":
                    chunk = [file for file in chunk if file != test]
                waiting.append(chunk)
                continue
            result, passed = CAUGHT, passed + run.passed
            break
        else:
            test = how = ""
        seconds = round(time.monotonic() - begin)
        return Row(mistake.name, result, test, how, passed, seconds, self.commit, mistake.digest)

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

    def _passes_without(self, test: str) -> bool:
        self.copy.restore()
        return self._pytest([test, *ARGUMENTS]).code in (0, NO_TESTS)

    def _pytest(self, arguments: Sequence[str]) -> Run:
        self._told = str(uuid.uuid4())
        environment = {**os.environ, "PYTHONPATH": str(self.copy.root), "COLUMNS": "400", TOLD: self._told}
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
                _end_all(self._told)
                process.wait()
            file.seek(0)
            output = file.read().decode(errors="replace")
        if self.ended:
            raise PytestError("it was interrupted")
        failure, passed = FAILURE.search(output), PASSED.findall(output)
        return Run(code, int(passed[-1]) if passed else 0, failure.group(2) if failure else "", output)


def _file(copy: Copy, mistake: Mistake) -> str:
    with copy.with_mistake(mistake) as path:
        return path


def _chunks(files: Sequence[str]) -> Iterator[list[str]]:
    remaining = iter(files)
    for size in (*CHUNKS, len(files)):
        if chunk := list(islice(remaining, size)):
            yield chunk


def _ending(run: Run, chunk: Sequence[str]) -> tuple[str, str]:
    """The test that ended a run, and how. Raises PytestError where it was none."""
    if run.code is None:
        return chunk[0], "hung"
    if run.code < 0:
        return chunk[0], "crashed"
    if not run.failure:
        raise PytestError(f"pytest ended with {run.code}:\n{run.output[-2000:]}")
    return run.failure, "failed" if "::" in run.failure else "not collected"


def _end_all(told: str) -> None:
    """Kills what a run of pytest started and did not end: ranks and servers are in sessions of their own."""
    word = f"{TOLD}={told}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if word in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
