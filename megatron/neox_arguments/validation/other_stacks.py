"""Translates keys of other stacks (TRL, peft, axolotl, ...) to ours, by the tables of
docs/from-other-stacks.md.

The tables are read when a configuration has an unknown key.
"""

import re
from collections.abc import Iterator
from pathlib import Path

TABLES = Path(__file__).with_suffix(".txt")
_LINK = re.compile(r"\s*\(?\[[^]]+\]\([^)]+\)\)?")  # which lead nowhere outside of the page
_MAX_ANSWERS = 3


def name_here(name: str) -> str | None:
    """Returns our key for a key of another stack, and the stacks that have it: `save (TRL, axolotl)`.

    If stacks use the name for different things, it returns up to `_MAX_ANSWERS` such answers. None if no
    stack has the name.
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
    """Returns our answer for each of another stack's names in a row of a table.

    It is one key for each name if `answer` has as many keys as the row has names, else all of `answer`.
    """
    single = re.findall(r"`[\w.]+`", answer)
    return single if ", ".join(single) == answer and len(single) == len(names) else [answer] * len(names)


def _rows() -> Iterator[tuple[str, list[str], str]]:
    """Yields (stack, the stack's names, our answer) for each row of the tables in `TABLES`."""
    stack = ""
    for line in TABLES.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            stack = line.removeprefix("## ").removesuffix(": every trainer").removeprefix("TRL: ")
            stack = {"Flags that TRL 1.16 no longer has": "older TRL"}.get(stack, stack)
        elif line.startswith("| `"):
            names_cell, answer = line.removeprefix("| ").removesuffix(" |").split(" | ", 1)
            yield stack, [name.removeprefix("--") for name in re.findall(r"`([^`]+)`", names_cell)], answer.strip()
