"""Writes docs/configuration.md and docs/configuration.schema.json from the declarations of keys.

With --check it writes nothing, and exits with 1 if a file is out of date."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.neox_arguments import NeoXArgs  # noqa: E402
from megatron.neox_arguments.reports.key_reference import config_reference  # noqa: E402
from megatron.neox_arguments.reports.schema import json_schema  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

HEAD = """\
# Configuration keys

Made by `python tools/docs/config_reference.py`; do not edit.

Write keys in YAML or JSON files, in `dash-style` or `under_score`. A key may occur in only one file.
`null` means unset.

| To | use |
|---|---|
| override files | `--set optimizer.params.lr=1e-3 fp16=null` |
| read the environment | `${NAME}` or `${NAME:-default}` as a value |
| see every value and its origin | `--print-config` |
| explain a key | `python deepy.py --help-config KEY` |
| compare two files | `--diff-config a.yml b.yml` |
| complete and check in an editor | `# yaml-language-server: $schema=docs/configuration.schema.json` as first line |

| Standing | Meaning |
|---|---|
| *honoured* | a run follows it |
| *honoured, differs* | GPT-NeoX acts differently, as described |
| *no effect* | accepted, but changes no number |
| *refused* | loads, but a run stops before its first step if set |
| *later* | refused until its feature is built |

## Number of keys
"""


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", metavar="DIR")
    options = parser.parse_args()
    texts = {
        "configuration.md": HEAD + config_reference(NeoXArgs) + "\n",
        "configuration.schema.json": json.dumps(json_schema(NeoXArgs), indent=1) + "\n",
    }
    stale = []
    for name, text in texts.items():
        path = options.output / name
        if not options.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
    for path in stale:
        sys.stderr.write(f"{path} is out of date; run python tools/docs/config_reference.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    run_command(main)
