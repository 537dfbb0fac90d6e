"""Selects the tests that a change can make fail. A plugin of pytest, loaded by tests/conftest.py.

`pytest --changed` (`make test CHANGED=1`, .ci/run) leaves out tests that are `more`, or expensive by the
record of the last full run (tests/last_run.py), in files that depend on nothing changed since that run
(tests/import_graph.py). All other tests, and those that failed there, run always. Everything runs where no
record of an ancestor is there, or a file of CORE changed. What was left out is printed.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.import_graph import ImportGraph
from tests.last_run import RECORD, ROOT, FullRun, changed_files, function_of

# What decides how every test runs. The Makefile does not: tests of its targets name it.
CORE = (
    "tests/conftest.py", "tests/pool/*.py", "tests/retry.py", "tests/selection.py", "tests/import_graph.py",
    "tests/last_run.py", "constraints.txt", "pyproject.toml", "setup.py", ".ci/*",
)  # fmt: skip
TEST_FILE = re.compile(r"tests/(.*/)?test_\w+\.py")
SELECTED, LEFT_OUT = "selected_test_files", "tests_left_out"  # between pytest-xdist's processes


@dataclass(frozen=True)
class Selection:
    """files: test files that depend on a changed file, nearest in the import graph first; None: all run,
    because of `reason`."""

    files: list[str] | None
    reason: str = ""
    changed: list[str] = field(default_factory=list)


def select(root: Path, changed: Iterable[str]) -> Selection:
    """The test files that changed files touch."""
    changed = sorted(set(changed) - {RECORD.relative_to(ROOT).as_posix()})
    if core := [path for path in changed if any(fnmatch(path, pattern) for pattern in CORE)]:
        return Selection(None, f"{', '.join(core[:3])} changed, which all tests use", changed)
    nearest = ImportGraph.of(root).dependents(changed)
    files = [path for path in nearest if TEST_FILE.fullmatch(path) and (root / path).exists()]
    return Selection(sorted(files, key=lambda path: (nearest[path], path)), "", changed)


def select_changed(record: FullRun, root: Path = ROOT) -> Selection:
    """The same for what changed since the last full run."""
    changed = changed_files(record.commit, root)
    if changed is None:
        reason = f"{record.commit[:12]} is not an ancestor" if record.commit else "no full run is recorded"
        return Selection(None, f"{reason} (tests/last_full_run.json, written by make test-all)")
    return select(root, changed)


class SelectionPlugin:
    """Chooses in the process that hands out the tests; workers of pytest-xdist are told."""

    def __init__(self, record: FullRun, root: Path = ROOT) -> None:
        self.record, self.root = record, root
        self.selection = Selection(None, "not chosen yet")
        self.left_out: Counter[str] = Counter()  # tests by file

    def pytest_configure(self, config: pytest.Config) -> None:
        if hasattr(config, "workerinput"):
            self.selection = Selection(json.loads(config.workerinput[SELECTED]))
        else:
            self.selection = select_changed(self.record, self.root)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[SELECTED] = json.dumps(self.selection.files)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.selection.files is None:
            return
        selected = set(self.selection.files)
        left_out = {item for item in items if file_of(item) not in selected and self._is_costly(item)}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=sorted(left_out, key=file_of))
        self.left_out = Counter(map(file_of, left_out))
        if hasattr(config, "workeroutput"):
            config.workeroutput[LEFT_OUT] = dict(self.left_out)

    def _is_costly(self, item: pytest.Item) -> bool:
        name = function_of(item.nodeid)
        costly = bool(item.get_closest_marker("more")) or name in self.record.expensive
        return costly and name not in self.record.failed

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.left_out |= Counter(getattr(node, "workeroutput", {}).get(LEFT_OUT, {}))  # every worker says the same

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("tests left out")
        if self.selection.files is None:
            terminalreporter.write_line(f"none: {self.selection.reason}")
            return
        terminalreporter.write_line(
            f"{self.left_out.total()} tests of {len(self.left_out)} files, which none of the"
            f" {len(self.selection.changed)} files changed since {self.record.commit[:12]} touches:"
        )
        for path, count in sorted(self.left_out.items()):
            terminalreporter.write_line(f"  {path}: {count}")


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
