"""Defines the result of one check, and renders all results as a table or JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

_COLOURS = {"ok": "\033[32m", "warning": "\033[33m", "failed": "\033[31m"}


@dataclass(frozen=True)
class Check:
    """The result of one check.

    state: ok; warning: a run can start, but with a drawback; failed: no run can start.
    found: what the check found, in words.
    advice: what to do about it; "" if the check passed.
    """

    name: str
    state: Literal["ok", "warning", "failed"]
    found: str
    advice: str = ""


def failed(name: str, finding: str, advice: str = "") -> Check:
    """Returns the result of a failed check: with this finding no run can start."""
    return Check(name, "failed", finding, advice)


def warning(name: str, finding: str, advice: str = "") -> Check:
    """Returns the result of a check with a warning: a run can start, but with a drawback."""
    return Check(name, "warning", finding, advice)


def verdict(checks: Sequence[Check]) -> Literal["ok", "warning", "failed"]:
    """Returns the worst state among the checks: failed, warning or ok."""
    states = {check.state for check in checks}
    return "failed" if "failed" in states else "warning" if "warning" in states else "ok"


def table(checks: Sequence[Check], colours: bool = False) -> str:
    """Returns the checks as aligned lines: one line per check, its advice below it, and the number of checks
    in each state at the end.

    colours: whether to colour the states for a terminal.
    """
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        state = f"{check.state:<7}"
        if colours:
            state = f"{_COLOURS[check.state]}{state}\033[0m"
        lines.append(f"{check.name:<{width}}  {state}  {check.found}")
        if check.advice:
            lines.append(f"{'':<{width}}           {check.advice}")
    counts = {state: sum(check.state == state for check in checks) for state in _COLOURS}
    return "\n".join([*lines, "", ", ".join(f"{number} {state}" for state, number in counts.items() if number)])


def as_json(checks: Sequence[Check]) -> str:
    """Returns the checks as JSON: `{"state": worst, "checks": [{name, state, found, advice}, ...]}`."""
    return json.dumps({"state": verdict(checks), "checks": [asdict(check) for check in checks]}, indent=1)
