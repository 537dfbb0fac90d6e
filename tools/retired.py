#!/usr/bin/env python3
"""Prints what replaces a script of GPT-NeoX or of its fork that does not exist in this project.

The old names of the scripts are links to this file or to retired.sh. Replacements: docs/from-gpt-neox.md.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.process import run_command  # noqa: E402

PAGE, SECTION = ROOT / "docs" / "from-gpt-neox.md", "## Scripts"
NAMED_FLAG = "--named"  # retired.sh passes the script's name with this flag


def rows() -> dict[str, str]:
    """Reads docs/from-gpt-neox.md: what replaces each script of GPT-NeoX or its fork, by the script's old
    path."""
    section = PAGE.read_text("utf-8").partition(f"\n{SECTION}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {name: replacement for scripts, replacement in cells for name in re.findall(r"`([^`]+)`", scripts)}


def without_markup(text: str) -> str:
    """Returns Markdown as plain text: without backticks, and with each link replaced by its text."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


def main() -> int:
    words = sys.argv[1:]
    invoked = Path(words[1] if words[:1] == [NAMED_FLAG] else sys.argv[0]).absolute()
    name = invoked.relative_to(ROOT).as_posix() if invoked.is_relative_to(ROOT) else invoked.name
    replacement = rows().get(name)
    answer = (
        f"unknown script; {PAGE} lists the replacements of scripts"
        if replacement is None
        else f"this script does not exist here; instead: {without_markup(replacement)}"
    )
    sys.stderr.write(f"{name}: {answer}\n")
    return 2


if __name__ == "__main__":
    run_command(main)
