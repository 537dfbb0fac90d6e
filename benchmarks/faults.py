"""A campaign of faults: small runs are broken at drawn places and started again, and must come to the same bits.

    python benchmarks/faults.py --seed 1 --n 100        # goes on where the ledger ends
    python benchmarks/faults.py --seed 1 --only 17      # one case again, with its outputs
    python benchmarks/faults.py --table                 # what the ledger says: faults and phases

A case is a layout, an objective, and a fault in a phase of a run, or a damaged file between two starts. The
ledger has a line for each case. Ranks are forks of this process, so a case takes seconds.
"""  # noqa: W505 (lines to copy)

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

LEDGER = ROOT / "benchmarks" / "results" / "faults.jsonl"


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a ledger."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines of Markdown: for each fault and phase how many cases were tried, went on and were
    refused, and how many were wrong."""
    lines = []
    for field, title in (("fault", "Fault"), ("phase", "Phase"), ("layout", "Layout"), ("objective", "Objective")):
        counts: dict[str, Counter[str]] = {}
        for row in rows:
            if row["verdict"] != "missed":
                counts.setdefault(row[field], Counter())[row["verdict"]] += 1
        lines += [f"| {title} | Tried | Continued, bit-equal | Refused by name | Wrong |", "|---|---:|---:|---:|---:|"]
        for name, count in sorted(counts.items()):
            lines.append(f"| {name} | {count.total()} | {count['equal']} | {count['refused']} | {count['wrong']} |")
        lines.append("")
    return lines


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the seed from which cases are drawn")
    parser.add_argument("--n", type=int, default=100, help="the number of cases of this seed (default: 100)")
    parser.add_argument("--only", type=int, nargs="+", metavar="INDEX", help="run these cases and keep their files")
    parser.add_argument("--layouts", nargs="+", metavar="NAME", help="take the cases of these layouts alone")
    parser.add_argument("--objectives", nargs="+", metavar="NAME", help="take the cases of these objectives alone")
    parser.add_argument("--ledger", type=Path, default=LEDGER, help="the file with a line for each case")
    parser.add_argument("--table", action="store_true", help="print the table of the ledger and end")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(read_ledger(options.ledger))))
        return 0
    from benchmarks.fault_campaign.cases import References, case_of, draw, judge, ledger_row
    from benchmarks.fault_campaign.processes import warm_up

    warm_up()
    rows = {row["index"]: row for row in read_ledger(options.ledger) if row["seed"] == options.seed}
    all_cases = (draw(options.seed, index) for index in itertools.count())
    matching_cases = (case for case in all_cases if case.layout in (options.layouts or [case.layout])
             and case.objective in (options.objectives or [case.objective]))  # fmt: skip
    if options.only:
        cases = [case_of(rows[index]) if index in rows else draw(options.seed, index) for index in options.only]
    else:
        cases = [case for case in itertools.islice(matching_cases, options.n) if case.index not in rows]
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    wrong = 0
    folder = Path(tempfile.mkdtemp(prefix="neox_faults_"))  # TemporaryDirectory's would be removed by forks that end
    try:
        references = References(folder / "references")
        for case in cases:
            outcome = judge(case, references, folder / f"case_{case.index}" if options.only else None)
            wrong += outcome.verdict == "wrong"
            row = {**ledger_row(case, outcome), "commit": commit.stdout.strip()}
            print(json.dumps(row), flush=True)
            if not options.only:
                options.ledger.parent.mkdir(parents=True, exist_ok=True)
                with options.ledger.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    finally:
        shutil.rmtree(folder / "references" if options.only else folder, ignore_errors=True)
    print(f"{len(cases)} cases, {wrong} wrong" + (f"; files and outputs: {folder}" if options.only else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    run_command(main)
