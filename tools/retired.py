#!/usr/bin/env python3
"""Says what a script of GPT-NeoX or of its fork is called here. Their names are links to this file, or to
retired.sh, and what each is told stands in docs/from-gpt-neox.md.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.process import run_command  # noqa: E402

PAGE, SECTION = ROOT / "docs" / "from-gpt-neox.md", "## Scripts"
NAMED = "--named"  # by retired.sh


def rows() -> dict[str, str]:
    """What is here in the place of each script, by its path in GPT-NeoX or in its fork."""
    section = PAGE.read_text("utf-8").partition(f"\n{SECTION}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {name: ours for theirs, ours in cells for name in re.findall(r"`([^`]+)`", theirs)}


def plain(text: str) -> str:
    """Markdown without links and backticks."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


def main() -> int:
    words = sys.argv[1:]
    typed = Path(words[1] if words[:1] == [NAMED] else sys.argv[0]).absolute()
    name = typed.relative_to(ROOT).as_posix() if typed.is_relative_to(ROOT) else typed.name
    ours = rows().get(name)
    said = f"is no script that is known; see {PAGE}" if ours is None else f"is not here; {plain(ours)}"
    sys.stderr.write(f"{name}: {said}\n")
    return 2


if __name__ == "__main__":
    run_command(main)
