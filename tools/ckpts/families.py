"""Prints the HuggingFace model families that can be converted, with the features that set each apart.

python tools/ckpts/families.py              # all families, one line each
python tools/ckpts/families.py gemma2       # one family, with model_type, architectures, features and notes
"""  # noqa: W505 (lines to copy)

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "model_type",
        nargs="*",
        help="model_type in config.json, or the begin of a family's name (default: all families)",
    )
    options = parser.parse_args(argv)
    from megatron.checkpointing.families.feature_table import family_rows

    rows = family_rows()
    row_by_name = {name: row for row in rows for name in row.model_types}
    row_by_name |= {
        word: row for word in options.model_type for row in rows if row.title.lower().startswith(word.lower())
    }
    unknown = [name for name in options.model_type if name not in row_by_name]
    if unknown:
        sys.exit(f"families.py: error: {unknown[0]}: no such family; choose from {', '.join(sorted(row_by_name))}")
    for name in options.model_type:
        row = row_by_name[name]
        print(f"{row.title}\n  model_type     {', '.join(row.model_types)}")
        print(f"  architectures  {', '.join(row.architectures)}")
        print("  features       " + "\n                 ".join(row.features))
        if row.notes:
            print(f"  note           {row.notes}")
    if not options.model_type:
        width = max(len(row.title) for row in rows)
        types = max(len(", ".join(row.model_types)) for row in rows)
        for row in rows:
            print(f"{row.title:<{width}}  {', '.join(row.model_types):<{types}}  {', '.join(row.features)}")
    try:
        print(f"transformers {version('transformers')} is installed; docs/huggingface.md names the tested version")
    except PackageNotFoundError:
        print("transformers is not installed; docs/huggingface.md names the version that was tested")


if __name__ == "__main__":
    run_command(main)
