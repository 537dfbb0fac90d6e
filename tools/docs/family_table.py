"""Writes the table of HuggingFace families in docs/huggingface.md; with --check only says if it is out of
date."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.checkpointing.families.feature_table import FamilyRow, family_rows  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.docs.generated_page import write_or_check  # noqa: E402

BEGIN = "<!-- families: made by tools/docs/family_table.py; do not edit -->\n"
END = "<!-- end -->\n"


def table() -> str:
    """Returns a Markdown table with one row per family, and below it the version of transformers that was
    tested."""
    pinned = re.search(r"^transformers==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert pinned is not None
    head = [
        "| family | `model_type` | architectures | default configuration | options, notes |",
        "|---|---|---|---|---|",
    ]
    tested = (
        f"\nTested against transformers {pinned[1]}: logits and three steps of AdamW of each family, and its greedy"
        " text (except\nFalcon-Mamba and Nemotron-H).\n"
    )
    return "\n".join([*head, *map(_line, family_rows())]) + "\n" + tested


def _line(row: FamilyRow) -> str:
    types, classes = (", ".join(f"`{name}`" for name in names) for names in (row.model_types, row.architectures))
    return f"| {row.title} | {types} | {classes} | {', '.join(row.features)} | {row.notes} |"


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is out of date")
    options = parser.parse_args()
    return write_or_check(
        ROOT / "docs" / "huggingface.md", {BEGIN: table()}, END, "tools/docs/family_table.py", options.check
    )


if __name__ == "__main__":
    run_command(main)
