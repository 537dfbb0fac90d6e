"""How long the tests of each room take, beside the last full run and a budget: tests/budget.toml.

A plugin of pytest, loaded by tests/conftest.py. At the end of a run of `make test` or `make test-all` it
prints seconds of a worker per kind of test and room. A room above its budget is a warning, since seconds
depend on the machine. `--record` (make test-all) writes tests/last_full_run.json.
"""

import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from tests.last_run import RECORD, ROOT, FullRun, clean_commit, function_of, read_record, write_record

BUDGET = Path(__file__).with_name("budget.toml")
TESTS = BUDGET.parent
ROOM_OF_TOP = "."  # the files of tests/ itself
KINDS = ("product", "more")  # marks; a test with neither is ordinary

Seconds = dict[str, dict[str, float]]
"""By kind of test, then by room."""


def room_of(nodeid: str) -> str:
    folders = Path(nodeid.partition("::")[0]).parts[1:-1]
    return folders[0] if folders else ROOM_OF_TOP


def over_budget(seconds: Seconds, budget: Seconds) -> list[str]:
    """One line for each room above its budget; a room without one may take nothing."""
    return [
        f"tests/{room}, {kind}: {room_seconds:.0f} s, budget {allowed:g} s"
        for kind, rooms in sorted(seconds.items())
        for room, room_seconds in sorted(rooms.items())
        if room_seconds > (allowed := budget.get(kind, {}).get(room, 0))
    ]


def table(seconds: Seconds, last: Seconds, budget: Seconds) -> list[str]:
    """Seconds of a worker: this run, the last full run, the budget; the longest first, then all of it."""
    lines = [f"{'':<28}{'seconds':>10}{'last full':>12}{'budget':>10}"]
    for kind, rooms in sorted(seconds.items()):
        columns = [rooms, last.get(kind, {}), budget.get(kind, {})]
        rows = {f"{kind} {room}": [column.get(room, 0) for column in columns] for room in sorted(rooms, key=rooms.get)}
        rows = dict(reversed(rows.items())) | {f"{kind}, all": [sum(column.values()) for column in columns]}
        lines += [
            f"{name:<28}{now:>10.0f}{last_seconds:>12.0f}{allowed:>10.0f}"
            for name, (now, last_seconds, allowed) in rows.items()
        ]
    return lines


class BudgetPlugin:
    """Adds up where reports arrive, which with pytest-xdist is the process that hands out the tests."""

    def __init__(self, budget_file: Path = BUDGET, record: Path = RECORD, root: Path = ROOT) -> None:
        self.budget_file, self.record = budget_file, record
        self.seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.functions: defaultdict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self.root, self.commit = Path(root), ""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if session.config.getoption("record"):  # before the tests, of which none may write into the tree
            self.commit = clean_commit(self.root) or ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kind = next((mark for mark in KINDS if mark in report.keywords), "ordinary")
        self.seconds[kind][room_of(report.nodeid)] += report.duration
        self.functions[function_of(report.nodeid)] += report.duration if kind == "ordinary" else 0
        if report.failed:
            self.failed.add(function_of(report.nodeid))

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
    ) -> None:
        if hasattr(config, "workerinput") or not is_full_run(config):  # a worker of pytest-xdist saw its part alone
            return
        budget, last = tomllib.loads(self.budget_file.read_text()), read_record(self.record).seconds
        terminalreporter.section("seconds of a worker, and budgets (tests/budget.toml)")
        terminalreporter.write("".join(f"{line}\n" for line in table(self.seconds, last, budget)))
        for line in over_budget(self.seconds, budget):
            terminalreporter.write_line(f"over budget: {line}", yellow=True)
        if config.getoption("record"):
            terminalreporter.write_line(self._write_record(exitstatus))

    def _write_record(self, exitstatus: int) -> str:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return f"{self.record.name} is as it was: the run did not reach its end"
        if not self.commit:
            return f"{self.record.name} is as it was: files differed from the commit that was tested"
        seconds = read_record(self.record).seconds | {kind: dict(rooms) for kind, rooms in self.seconds.items()}
        write_record(FullRun(self.commit, list(self.failed), seconds, dict(self.functions)), self.record)
        return f"{self.record.name}: a full run of {self.commit[:12]}, {len(self.failed)} failed; commit it"


def is_full_run(config: pytest.Config) -> bool:
    """Whether a target was run, rather than some tests by name."""
    option = config.option
    narrowed = option.keyword or option.deselect or option.ignore or option.ignore_glob or option.collectonly
    if narrowed or option.maxfail or getattr(option, "lf", False):
        return False
    return {Path(argument).resolve() for argument in config.args} == {TESTS.resolve()}
