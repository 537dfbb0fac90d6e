"""Writes the tables of keys in docs/pipeline.md from the declarations; --check: are they stale?"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.neox_arguments.keys.declaration import Key, keys_of  # noqa: E402
from megatron.pipelines.definition import PipelineKeys, Source, Stage  # noqa: E402
from megatron.pipelines.gates import GateKeys, Requirement  # noqa: E402

END = "<!-- end -->\n"
PAGE = ROOT / "docs" / "pipeline.md"
TABLES = {"pipeline": PipelineKeys, "stage": Stage, "source": Source, "gate": GateKeys, "requirement": Requirement}


def table(declaration: type) -> str:
    """A row for each key: what it means, and what it is when it is left out."""
    rows = [f"| `{name}` | {key.meaning} | {_default(key)} |" for name, key in keys_of(declaration).items()]
    return "\n".join(["| key | meaning | left out |", "|---|---|---|", *rows]) + "\n"


def _default(key: Key) -> str:
    if key.required:
        return "**required**"
    return {None: "unset", True: "true", False: "false", (): "none"}.get(key.default, str(key.default))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a table is stale")
    options = parser.parse_args()
    text = made = PAGE.read_text(encoding="utf-8")
    for name, declaration in TABLES.items():
        begin = f"<!-- keys of {name}: made by tools/docs/pipeline_reference.py; do not edit -->\n"
        before, rest = made.split(begin)
        made = before + begin + table(declaration) + END + rest.split(END, 1)[1]
    if options.check and made != text:
        sys.stderr.write(f"{PAGE} is stale; run python tools/docs/pipeline_reference.py\n")
        return 1
    if not options.check:
        PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
