"""Writes the table of keys that GPT-NeoX declares but never reads into docs/from-gpt-neox.md.

With --check it writes nothing, and exits with 1 if the table is out of date."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.neox_arguments import NeoXArgs  # noqa: E402
from megatron.neox_arguments.keys.declaration import Key, keys_of  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.docs.generated_page import write_or_check  # noqa: E402

BEGIN = "<!-- unread: made by tools/docs/unread_keys.py; do not edit -->\n"
END = "<!-- end of unread -->\n"


def table() -> str:
    """Returns a Markdown table with one row per key that GPT-NeoX declares but never reads.

    A row says what this project does with the key, and what this means for a configuration of GPT-NeoX.
    """
    rows = [f"| `{key.name}` | {_done(key)} | {key.unread} |" for key in keys_of(NeoXArgs).values() if key.unread]
    return "\n".join(["| Key | Here | For a file written for GPT-NeoX |", "|---|---|---|", *sorted(rows), ""])


def _done(key: Key) -> str:
    if key.same_as is not None:
        return f"may repeat `{key.same_as}`"
    return {"later": "refused", "honoured, differs": "followed"}.get(key.standing, key.standing)


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is out of date")
    options = parser.parse_args()
    page = ROOT / "docs" / "from-gpt-neox.md"
    return write_or_check(page, {BEGIN: table()}, END, "tools/docs/unread_keys.py", options.check)


if __name__ == "__main__":
    run_command(main)
