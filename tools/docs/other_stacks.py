"""Writes the tables of other stacks' keys in docs/from-other-stacks.md, from the file that hints are made
from.

With --check it writes nothing, and exits with 1 if the tables are out of date."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.neox_arguments.validation.other_stacks import TABLES  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.docs.generated_page import write_or_check  # noqa: E402

PAGE = ROOT / "docs" / "from-other-stacks.md"
BEGIN = "<!-- keys: made by tools/docs/other_stacks.py of validation/other_stacks.txt; do not edit -->\n"
END = "<!-- end of keys -->\n"


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the tables are out of date")
    options = parser.parse_args()
    tables = "\n" + TABLES.read_text(encoding="utf-8") + "\n"
    return write_or_check(PAGE, {BEGIN: tables}, END, "tools/docs/other_stacks.py", options.check)


if __name__ == "__main__":
    run_command(main)
