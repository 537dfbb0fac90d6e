"""Writes docs/configuration.md from the declarations; with --check exits 1 when the file is stale."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.neox_arguments import NeoXArgs  # noqa: E402
from megatron.neox_arguments.report import config_reference  # noqa: E402

HEAD = """\
# Configuration keys

Made by `python tools/docs/config_reference.py`; do not edit.

Keys are written in YAML or JSON files, `dash-style` or `under_score`; a key may stand in one of the files only.
`--set key=value ...` overrides them last: `--set optimizer.params.lr=1e-3 fp16=null`. `--print-config` shows every
value and where it comes from. A default of `null` means unset.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when docs/configuration.md is stale"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "configuration.md")
    options = parser.parse_args()
    text = HEAD + config_reference(NeoXArgs) + "\n"
    if not options.check:
        options.output.write_text(text, encoding="utf-8")
        return 0
    if options.output.exists() and options.output.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{options.output} is stale; run python tools/docs/config_reference.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
