"""Translates keys of other training frameworks (TRL, peft, axolotl, ...) to ours.

The tables are those of docs/from-other-stacks.md.

The tables are read when a configuration has an unknown key.
"""

import re
from collections.abc import Iterator
from pathlib import Path

TABLES = Path(__file__).with_suffix(".txt")
_LINK = re.compile(r"\s*\(?\[[^]]+\]\([^)]+\)\)?")  # links, which work only on the page
_MAX_ANSWERS = 3


def name_here(name: str) -> str | None:
    """Returns our key for a key of other training frameworks, and these frameworks: `save (TRL, axolotl)`.

    If frameworks use the name for different things, returns up to `_MAX_ANSWERS` such answers. Returns None
    if no framework has the name.
    """
    stacks_by_answer: dict[str, list[str]] = {}
    for stack, names, answer in _rows():
        if name in names:
            stacks_by_answer.setdefault(_paired(names, answer)[names.index(name)], []).append(stack)
    answers = [
        f"{_LINK.sub('', answer).replace('`', '')} ({', '.join(stacks)})" for answer, stacks in stacks_by_answer.items()
    ]
    return "; ".join(answers[:_MAX_ANSWERS]) or None


def _paired(names: list[str], answer: str) -> list[str]:
    """Returns our counterpart of each name in a row of a table of another framework's keys.

    answer: the row's cell with our keys. If it lists as many keys as the row has names, each name gets one of
    them. Else each name gets all of `answer`.
    """
    single = re.findall(r"`[\w.]+`", answer)
    return single if ", ".join(single) == answer and len(single) == len(names) else [answer] * len(names)


def _rows() -> Iterator[tuple[str, list[str], str]]:
    """Yields (framework, its names of a key, the cell with our key) for each row of the tables in
    `TABLES`."""
    stack = ""
    for line in TABLES.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            stack = line.removeprefix("## ").removesuffix(": every trainer").removeprefix("TRL: ")
            stack = {"Flags that TRL 1.16 no longer has": "older TRL"}.get(stack, stack)
        elif line.startswith("| `"):
            names_cell, answer = line.removeprefix("| ").removesuffix(" |").split(" | ", 1)
            yield stack, [name.removeprefix("--") for name in re.findall(r"`([^`]+)`", names_cell)], answer.strip()
