"""`pytest --forked`: each test in a process of its own, which GPT-NeoX's users type.

Loaded by tests/conftest.py. A test that ends its process fails, with the signal or exit status and what the
process wrote, and the tests after it go on.
"""

import json
import os
import signal
import sys

import pytest
from _pytest.runner import runtestprotocol

Report = pytest.TestReport


class ForkedPlugin:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in _reports_of_child(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def _reports_of_child(item: pytest.Item) -> list[Report]:
    """Forks, runs the test with its fixtures in the child, and returns the child's reports."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        _run(item, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            written = pipe.read()
        end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except pytest.fail.Exception as timeout:  # of pytest-timeout, whose alarm rings in this process
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return [_failure(item, str(timeout))]
    if end != 0 or not written:
        cause = signal.Signals(-end).name if end < 0 else f"exit status {end}"
        return [_failure(item, f"the test's process ended by {cause}")]
    return [
        item.config.hook.pytest_report_from_serializable(config=item.config, data=data) for data in json.loads(written)
    ]


def _run(item: pytest.Item, writing: int) -> None:
    """Runs the test in the child, writes its reports as JSON to the file descriptor `writing`, and ends."""
    status = 1
    try:
        reports = runtestprotocol(item, log=False, nextitem=None)
        hook = item.config.hook
        data = [hook.pytest_report_to_serializable(config=item.config, report=report) for report in reports]
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(data, default=str).encode())
        status = 0
    finally:
        os._exit(status)


def _failure(item: pytest.Item, message: str) -> Report:
    sections = []
    if capture := item.config.pluginmanager.getplugin("capturemanager"):
        output, errors = capture.read_global_capture()  # both processes write to the same files
        sections = [("Captured stdout", output), ("Captured stderr", errors)]
    return Report(
        item.nodeid, item.location, dict(item.keywords), "failed", message, "call", [s for s in sections if s[1]]
    )
