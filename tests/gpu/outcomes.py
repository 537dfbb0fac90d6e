"""A plugin of pytest that writes what became of each test as it ends: a run that is cut leaves a table.

`-p tests.gpu.outcomes --outcomes FILE`: a line of JSON when a test begins, one when it has ended, and one
when all have. Tests that have ended there are not run again. `--passed FILE`: names of tests that passed in
an earlier run, a list of JSON; they run last. `--rehearse` runs tests for GPUs on a CPU.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROKEN = 70  # exit status of a process whose GPU takes no more work


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "tests that need a GPU")
    group.addoption("--outcomes", type=Path, metavar="FILE", help="write each test's outcome as it ends")
    group.addoption("--passed", type=Path, metavar="FILE", help="run the tests that it names after all others")
    group.addoption("--rehearse", action="store_true", help="run them on a CPU, with gloo")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("outcomes")
    if path is not None:
        passed = config.getoption("passed")
        names = json.loads(passed.read_text(encoding="utf-8")) if passed is not None else []
        config.pluginmanager.register(Outcomes(path, frozenset(names)), "gpu outcomes")


class Outcomes:
    def __init__(self, path: Path, passed: frozenset[str]) -> None:
        self.path, self.passed = path, passed
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.finished = {row["name"] for row in map(json.loads, lines) if row.get("outcome")}
        self.rows: dict[str, dict[str, Any]] = {}

    def _write(self, row: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if _name(item.nodeid) in self.finished]
        items[:] = [item for item in items if item not in done]
        items.sort(key=lambda item: _name(item.nodeid) in self.passed)
        config.hook.pytest_deselected(items=done)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        name = _name(item.nodeid)
        self._write({"name": name, "begun": True})
        self.rows[name] = {"name": name, "outcome": "passed", "seconds": 0.0, "reason": ""}
        yield
        row = self.rows.pop(name)
        broken = _broken_gpu()
        self._write({**row, "seconds": round(row["seconds"], 2)})
        if broken and row["outcome"] == "failed":
            os._exit(BROKEN)  # every later test would fail alike: the next process has a new context

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self.rows[_name(report.nodeid)]
        row["seconds"] += report.duration
        if report.failed or (report.skipped and row["outcome"] == "passed"):
            row |= {"outcome": report.outcome, "reason": _reason(report)}

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write({"finished": int(exitstatus)})


def _name(nodeid: str) -> str:
    return nodeid.rpartition("/")[2]


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr
    if isinstance(text, tuple):  # of a skip: file, line, words
        return str(text[2]).removeprefix("Skipped: ")
    crash = getattr(text, "reprcrash", None)
    return str(text if crash is None else crash.message)[:500]


def _broken_gpu() -> bool:
    """Whether the GPU of this process answers nothing any more, as after an access out of bounds."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
