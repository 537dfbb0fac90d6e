"""Writes generated parts of documentation pages; each part stands between two marks."""

import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(page: Path, parts: Mapping[str, str], end: str, script: str, check: bool) -> int:
    """Replaces the generated parts of a page; with `check` only reports whether the page is out of date.

    parts: generated text by the line above it in the page. Each part ends at the next `end`. script: the
    command that updates the page. Returns the exit code.
    """
    text = updated = page.read_text(encoding="utf-8")
    for begin, part in parts.items():
        head, tail = updated.split(begin)
        updated = head + begin + part + end + tail.split(end, 1)[1]
    if check and updated != text:
        sys.stderr.write(f"{page} is stale; run python {script}\n")
        return 1
    if not check:
        page.write_text(updated, encoding="utf-8")
    return 0
