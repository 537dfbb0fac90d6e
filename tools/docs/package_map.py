"""Writes the table of packages in docs/development.md from the packages' docstrings.

With --check it writes nothing, and exits with 1 if the table is out of date."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.docs.generated_page import write_or_check  # noqa: E402

PAGE = ROOT / "docs" / "development.md"
BEGIN, END = "<!-- packages: made by tools/docs/package_map.py; do not edit -->\n", "<!-- end of packages -->\n"


def package_map(root: Path) -> str:
    """Returns a Markdown table of all packages below megatron/, each with the first sentence of its
    docstring."""
    lines = ["| package | what is in it |", "|---|---|"]
    for file in sorted((root / "megatron").rglob("__init__.py"), key=lambda file: file.parent.parts):
        folder = file.parent
        depth = len(folder.relative_to(root).parts) - 1
        if depth:
            name = f"{'&nbsp;&nbsp;' * (depth - 1)}[`{folder.name}/`](../{folder.relative_to(root)})"
            lines.append(f"| {name} | {_summary(file)} |")
    return "\n".join(lines) + "\n"


def _summary(file: Path) -> str:
    """Returns the first sentence of the docstring in a package's __init__.py. Exits if there is no
    docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not docstring:
        sys.exit(f"{file}: has no docstring; add one that says what is in the package")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".").replace("|", "\\|")


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is out of date")
    options = parser.parse_args()
    return write_or_check(PAGE, {BEGIN: package_map(ROOT)}, END, "tools/docs/package_map.py", options.check)


if __name__ == "__main__":
    run_command(main)
