"""A second run of tests that end processes, where the first failed.

Loaded by tests/conftest.py. A test with the mark `ends_processes` sends signals, and on a busy machine the
process that gets one may be elsewhere than the test means. It is run again once; the end of a run lists each
test that needed this, with its first failure. One that needs it twice in ten runs is to be mended.
"""

from collections.abc import Iterator

import pytest
from _pytest.runner import runtestprotocol

MARK = "ends_processes"
PROPERTY = "first_failure"  # carries the first failure from a worker of pytest-xdist to where reports arrive


class RetryPlugin:
    """Runs again where tests run, and lists where reports arrive."""

    def __init__(self) -> None:
        self.retried: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not item.get_closest_marker(MARK):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if failures := [report for report in reports if report.failed]:
            item._initrequest()  # type: ignore[attr-defined]  # fixtures of the test anew
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            for report in reports:
                report.user_properties = [*report.user_properties, (PROPERTY, _last_line(failures[0]))]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY:
                self.retried[report.nodeid] = str(value)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.retried:
            terminalreporter.section(f"{len(self.retried)} tests needed a second run")
            for name, failure in sorted(self.retried.items()):
                terminalreporter.write_line(f"{name}: {failure}")


def _last_line(report: pytest.TestReport) -> str:
    lines = [line.strip() for line in report.longreprtext.splitlines() if line.strip()]
    errors: Iterator[str] = (line for line in lines if line.startswith("E "))
    return next(errors, lines[-1] if lines else report.outcome)
