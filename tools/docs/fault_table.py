"""Writes the tables of docs/reliability.md from the ledger of benchmarks/faults.py.

With --check it writes nothing, and exits with 1 if the tables are out of date."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.faults import LEDGER, read_ledger, table  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.docs.generated_page import write_or_check  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- faults: made by tools/docs/fault_table.py of benchmarks/results/faults.jsonl; do not edit -->\n"
END = "<!-- end of faults -->\n"


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the tables are out of date")
    options = parser.parse_args()
    rows = read_ledger(LEDGER)
    reached = [row for row in rows if row["verdict"] != "missed"]
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    summary = (
        f"{len(reached)} faults (seed {seeds}). In {len(rows) - len(reached)} further cases the run never reached the "
        "place of the fault.\n\n"
    )
    text = summary + "\n".join(table(rows))
    return write_or_check(PAGE, {BEGIN: text}, END, "tools/docs/fault_table.py", options.check)


if __name__ == "__main__":
    run_command(main)
