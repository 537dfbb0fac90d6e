"""Writes the tables of keys in docs/pipeline.md and docs/experiments.md from the declarations of keys.

With --check it writes nothing, and exits with 1 if a table is out of date."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.experiments.sweep_file import SweepFields  # noqa: E402
from megatron.neox_arguments.keys.declaration import Key, keys_of  # noqa: E402
from megatron.pipelines.definition import PipelineKeys, Source, Stage  # noqa: E402
from megatron.pipelines.gates import GateKeys, Requirement  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.docs.generated_page import write_or_check  # noqa: E402

END = "<!-- end -->\n"
TABLES: dict[str, dict[str, type]] = {
    "pipeline.md": {
        "pipeline": PipelineKeys, "stage": Stage, "source": Source, "gate": GateKeys, "requirement": Requirement,
    },
    "experiments.md": {"sweep": SweepFields},
}  # fmt: skip
"""The declaration of each table, by page and name."""


def table(declaration: type) -> str:
    """Returns a Markdown table with one row per key that a class declares: name, meaning, default."""
    rows = [f"| `{name}` | {key.meaning} | {_default(key)} |" for name, key in keys_of(declaration).items()]
    return "\n".join(["| key | meaning | left out |", "|---|---|---|", *rows]) + "\n"


def _default(key: Key) -> str:
    if key.required:
        return "**required**"
    if isinstance(key.default, bool):
        return str(key.default).lower()
    return {None: "unset", (): "none"}.get(key.default, str(key.default))


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is out of date")
    options = parser.parse_args()
    mark = "<!-- keys of {}: made by tools/docs/pipeline_reference.py; do not edit -->\n"
    codes = []
    for page, tables in TABLES.items():
        parts = {mark.format(name): table(declaration) for name, declaration in tables.items()}
        codes.append(
            write_or_check(ROOT / "docs" / page, parts, END, "tools/docs/pipeline_reference.py", options.check)
        )
    return max(codes)


if __name__ == "__main__":
    run_command(main)
