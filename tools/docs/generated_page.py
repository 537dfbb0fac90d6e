"""Pages of documentation of which a part between two marks is made by a script."""

import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(page: Path, parts: Mapping[str, str], end: str, script: str, check: bool) -> int:
    """Put the parts into a page, each between its first line, by which it is named, and the next `end`; with
    check only say whether one is stale. The exit code."""
    text = made = page.read_text(encoding="utf-8")
    for begin, part in parts.items():
        before, rest = made.split(begin)
        made = before + begin + part + end + rest.split(end, 1)[1]
    if check and made != text:
        sys.stderr.write(f"{page} is stale; run python {script}\n")
        return 1
    if not check:
        page.write_text(made, encoding="utf-8")
    return 0
