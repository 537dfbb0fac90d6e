"""What one look at the machine found, and how all of them are shown."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

_COLOURS = {"ok": "\033[32m", "warning": "\033[33m", "failed": "\033[31m"}
_PLAIN = "\033[0m"


@dataclass(frozen=True)
class Check:
    """One thing that the doctor looked at. found: what was there, in words; advice: what to do, where it is
    not well."""

    name: str
    state: Literal["ok", "warning", "failed"]
    found: str
    advice: str = ""


def failed(name: str, found: str, advice: str = "") -> Check:
    """A check that no run could start with."""
    return Check(name, "failed", found, advice)


def warning(name: str, found: str, advice: str = "") -> Check:
    """A check that a run can start with, though not well."""
    return Check(name, "warning", found, advice)


def verdict(checks: Sequence[Check]) -> Literal["ok", "warning", "failed"]:
    """The worst state among the checks: failed, warning or ok."""
    states = {check.state for check in checks}
    return "failed" if "failed" in states else "warning" if "warning" in states else "ok"


def table(checks: Sequence[Check], colours: bool = False) -> str:
    """Aligned lines for people: a line a check, its advice below, a count at the end."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        state = f"{check.state:<7}"
        if colours:
            state = f"{_COLOURS[check.state]}{state}{_PLAIN}"
        lines.append(f"{check.name:<{width}}  {state}  {check.found}")
        if check.advice:
            lines.append(f"{'':<{width}}           {check.advice}")
    counts = {state: sum(check.state == state for check in checks) for state in _COLOURS}
    return "\n".join([*lines, "", ", ".join(f"{number} {state}" for state, number in counts.items() if number)])


def as_json(checks: Sequence[Check]) -> str:
    """`{"state": worst, "checks": [{name, state, found, advice}, ...]}`."""
    return json.dumps({"state": verdict(checks), "checks": [asdict(check) for check in checks]}, indent=1)
