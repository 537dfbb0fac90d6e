"""What `make test` and `make test-all` may cost: tests and processes started, per package of tests, in
budget.toml.

A plugin of pytest, loaded by tests/conftest.py. At the end of a run it prints what each package took beside
its budget. Only counts fail a run, and only where a whole target was run: minutes depend on the machine.
"""

import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BUDGET = Path(__file__).with_name("budget.toml")
TARGETS = {"": "test", "more": "test-more"}  # by what was given as -m
RANKS_STARTED = "tests.pool.ranks"  # audit event of the worker pool's client, with the number of ranks


@dataclass
class Cost:
    """What the tests of one package took. processes: ranks of the worker pool, and what tests started
    themselves."""

    minutes: float = 0.0
    tests: int = 0
    processes: int = 0


def over_budget(costs: dict[str, Cost], budget: dict[str, dict[str, float]]) -> list[str]:
    """One line for each count of a package that is above its budget; a package that has no budget may have
    none."""
    lines = []
    for package, cost in sorted(costs.items()):
        for count in ("tests", "processes"):
            allowed = budget.get(package, {}).get(count, 0)
            if getattr(cost, count) > allowed:
                lines.append(f"tests/{package}: {getattr(cost, count)} {count}, budget {allowed}")
    return lines


def table(costs: dict[str, Cost], budget: dict[str, dict[str, float]]) -> list[str]:
    """Each package's cost beside its budget, and the sum of all."""
    rows = sorted(costs.items(), key=lambda item: -item[1].minutes)
    total = Cost(*(sum(getattr(cost, name) for cost in costs.values()) for name in vars(Cost())))
    allowed = {name: sum(row.get(name, 0) for row in budget.values()) for name in vars(Cost())}
    lines = [f"{'package':<18}{'minutes of a worker':>24}{'tests':>16}{'processes':>16}   (each / budget)"]
    for package, cost, row in [*((name, cost, budget.get(name, {})) for name, cost in rows), ("all", total, allowed)]:
        minutes = f"{cost.minutes:.1f} / {row.get('minutes', 0):.1f}"
        tests, processes = (f"{getattr(cost, name)} / {row.get(name, 0)}" for name in ("tests", "processes"))
        lines.append(f"{package:<18}{minutes:>24}{tests:>16}{processes:>16}")
    return lines


class BudgetPlugin:
    """Counts where tests run, and adds up and judges where their reports arrive, which with pytest-xdist are
    different processes: the reports carry the counts."""

    def __init__(self, budget_file: Path = BUDGET) -> None:
        self.budget_file = budget_file
        self.costs: defaultdict[str, Cost] = defaultdict(Cost)
        self.excess: list[str] = []
        self.started = 0  # processes since the last report
        sys.addaudithook(self._on_audit_event)

    def _on_audit_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            self.started += 1
        elif event == RANKS_STARTED:
            self.started += args[0]

    def pytest_runtest_logstart(self) -> None:
        self.started = 0  # what collecting started, or pytest-xdist, is no test's

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        outcome = yield
        outcome.get_result().processes = self.started  # type: ignore[attr-defined]
        self.started = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folders = Path(report.nodeid.partition("::")[0]).parts[1:-1]
        cost = self.costs[folders[0] if folders else "."]
        cost.minutes += report.duration / 60
        cost.tests += report.when == "setup"
        cost.processes += getattr(report, "processes", 0)  # none where a worker of pytest-xdist crashed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # a worker of pytest-xdist: its reports are judged elsewhere
            return
        if target := whole_target(session.config):
            self.excess = over_budget(self.costs, self._budget(target))
        if self.excess and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if target := whole_target(config):
            terminalreporter.section(f"budget of make {target}")
            terminalreporter.write("".join(f"{line}\n" for line in table(self.costs, self._budget(target))))
        for line in self.excess:
            terminalreporter.write_line(f"OVER BUDGET (tests/budget.toml, [{target}]): {line}", red=True)

    def _budget(self, target: str) -> dict[str, dict[str, float]]:
        return tomllib.loads(self.budget_file.read_text()).get(target, {})


def whole_target(config: pytest.Config) -> str | None:
    """`test` or `test-more` where all tests of that target were asked for, else None."""
    option = config.option
    narrowed = option.keyword or option.deselect or option.ignore or option.ignore_glob or option.collectonly
    paths = {Path(argument).resolve() for argument in config.args}
    if narrowed or option.maxfail or getattr(option, "lf", False) or paths != {BUDGET.parent.resolve()}:
        return None
    return TARGETS.get(option.markexpr)
