"""What keys of other stacks (TRL, peft, axolotl, ...) are called here: the tables of
docs/from-other-stacks.md, which are read when a configuration has a name that is no key."""

import re
from collections.abc import Iterator
from pathlib import Path

TABLES = Path(__file__).with_suffix(".txt")
_LINK = re.compile(r"\s*\(?\[[^]]+\]\([^)]+\)\)?")  # which lead nowhere outside of the page
_SHOWN = 3


def name_here(name: str) -> str | None:
    """What a key of another stack is here, and whose it is: `save (TRL, axolotl)`, the first few of a name
    that several stacks use for different things; None for a name that none has."""
    found: dict[str, list[str]] = {}
    for stack, names, here in _rows():
        if name in names:
            found.setdefault(_paired(names, here)[names.index(name)], []).append(stack)
    answers = [f"{_LINK.sub('', here).replace('`', '')} ({', '.join(stacks)})" for here, stacks in found.items()]
    return "; ".join(answers[:_SHOWN]) or None


def _paired(names: list[str], here: str) -> list[str]:
    """The answer to each of the names of a row: one key each where there are as many, else all of the row."""
    single = re.findall(r"`[\w.]+`", here)
    return single if ", ".join(single) == here and len(single) == len(names) else [here] * len(names)


def _rows() -> Iterator[tuple[str, list[str], str]]:
    """(stack, names there, what they are here) of each row."""
    stack = ""
    for line in TABLES.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            stack = line.removeprefix("## ").removesuffix(": every trainer").removeprefix("TRL: ")
            stack = {"Flags that TRL 1.16 no longer has": "older TRL"}.get(stack, stack)
        elif line.startswith("| `"):
            there, here = line.removeprefix("| ").removesuffix(" |").split(" | ", 1)
            yield stack, [name.removeprefix("--") for name in re.findall(r"`([^`]+)`", there)], here.strip()
