"""Replaces the generated parts of documentation pages, which stand between a begin and an end mark."""

import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(page: Path, parts: Mapping[str, str], end: str, script: str, check: bool) -> int:
    """Replaces the generated parts of a page; with `check` only reports if the page is out of date.

    parts: generated text by its begin mark, the line above it in the page. Each part ends at the next `end`.
    script: the script that updates the page, for the message. Returns the exit code: 1 if out of date, else
    0.
    """
    text = updated = page.read_text(encoding="utf-8")
    for begin, part in parts.items():
        head, tail = updated.split(begin)
        updated = head + begin + part + end + tail.split(end, 1)[1]
    if check and updated != text:
        sys.stderr.write(f"{page} is out of date; run python {script}\n")
        return 1
    if not check:
        page.write_text(updated, encoding="utf-8")
    return 0
