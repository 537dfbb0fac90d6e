#!/usr/bin/env python3
"""Says what replaces a script of GPT-NeoX or of its fork.

The scripts' names are links to this file or to retired.sh. The replacements are in docs/from-gpt-neox.md.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.process import run_command  # noqa: E402

PAGE, SECTION = ROOT / "docs" / "from-gpt-neox.md", "## Scripts"
NAMED_FLAG = "--named"  # by retired.sh


def rows() -> dict[str, str]:
    """Returns what replaces each script of GPT-NeoX and its fork, by the script's path there."""
    section = PAGE.read_text("utf-8").partition(f"\n{SECTION}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {name: replacement for scripts, replacement in cells for name in re.findall(r"`([^`]+)`", scripts)}


def without_markup(text: str) -> str:
    """Returns a Markdown text without backticks, and with the words of links only."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


def main() -> int:
    words = sys.argv[1:]
    invoked = Path(words[1] if words[:1] == [NAMED_FLAG] else sys.argv[0]).absolute()
    name = invoked.relative_to(ROOT).as_posix() if invoked.is_relative_to(ROOT) else invoked.name
    replacement = rows().get(name)
    answer = (
        f"is not a script that is known; see {PAGE}"
        if replacement is None
        else f"is not here; {without_markup(replacement)}"
    )
    sys.stderr.write(f"{name}: {answer}\n")
    return 2


if __name__ == "__main__":
    run_command(main)
