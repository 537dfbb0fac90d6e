"""Makes each seeded mistake in a copy of the tree and runs the tests that CI would run for that change.

Prints for each which test caught it, or that it is alive, and keeps that in ledger.json, from which a later
run goes on. Exit status: 1 where a mistake no longer applies or pytest itself failed, else 0.
"""

import argparse
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.process.command_parser import CommandParser
from tests.mutations.anchor import NoLongerApplies
from tests.mutations.copies import Copy
from tests.mutations.ledger import ALIVE, ALIVE_NEAR, CAUGHT, LEDGER, Ledger
from tests.mutations.mistakes import FOLDER, Mistake, read_mistakes
from tests.mutations.trial import PytestError, Runner

ROOT = Path(__file__).resolve().parents[2]


def table(mistakes: Sequence[Mistake], ledger: Ledger) -> list[str]:
    """Per room and kind: caught, alive, not tried, and the share caught of those tried."""
    lines = [f"{'':<18}{'caught':>8}{'alive':>8}{'not tried':>11}{'share':>8}"]
    groups: dict[str, list[Mistake]] = {}
    for mistake in mistakes:
        for group in (mistake.room, f"all of kind {mistake.kind}", "all"):
            groups.setdefault(group, []).append(mistake)
    for group in sorted(groups, key=lambda name: (name.startswith("all"), len(name) if name == "all" else 0, name)):
        rows = [ledger.row(mistake) for mistake in groups[group]]
        caught = sum(row is not None and row.result == CAUGHT for row in rows)
        alive = sum(row is not None and row.result == ALIVE for row in rows)
        share = f"{100 * caught / (caught + alive):.0f} %" if caught + alive else "-"
        lines.append(f"{group:<18}{caught:>8}{alive:>8}{len(rows) - caught - alive:>11}{share:>8}")
    return lines


def run(
    mistakes: Sequence[Mistake], ledger: Ledger, jobs: int, limit: float, near_only: bool, root: Path = ROOT
) -> int:
    """Number of those that no longer apply, or whose tests could not be run."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True).stdout
    free: queue.Queue[Runner] = queue.Queue()

    def try_mistake(mistake: Mistake) -> bool:
        runner = free.get()
        try:
            last_row = ledger.rows.get(mistake.name)
            row = runner.try_out(mistake, [last_row.test] if last_row is not None and last_row.test else mistake.tests)
        except (NoLongerApplies, PytestError) as error:
            print(f"{mistake.room}/{mistake.name}: ERROR: {error}", flush=True)
            return False
        finally:
            free.put(runner)
        ledger.add(row)
        print(f"{mistake.room}/{mistake.name}: {row.line}", flush=True)
        return True

    runners = [Runner(Copy(root), commit.strip(), limit, near_only) for _ in range(min(jobs, len(mistakes)))]
    for runner in runners:
        free.put(runner)
    pool = ThreadPoolExecutor(jobs)
    try:
        return list(pool.map(try_mistake, mistakes)).count(False)
    finally:  # where it is interrupted, what runs is ended and counts for nothing
        for runner in runners:
            runner.end()
        pool.shutdown(cancel_futures=True)
        for runner in runners:
            runner.copy.close()


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m tests.mutations", description=__doc__.split("\n")[0])
    parser.add_argument("--room", action="append", default=[], help="a table's name; may be given again")
    parser.add_argument("--name", action="append", default=[], help="one mistake's name; may be given again")
    parser.add_argument("--jobs", type=int, default=2, help="mistakes at a time, each in a copy of its own (default 2)")
    parser.add_argument("--again", action="store_true", help="those that the ledger has already, too")
    parser.add_argument("--near", action="store_true", help="only short tests of near files; none is then alive yet")
    parser.add_argument("--limit", type=float, default=7200, help="seconds for one run of pytest (default 7200)")
    parser.add_argument("--list", action="store_true", help="print all with their state, and run nothing")
    parser.add_argument("--ledger", type=Path, default=LEDGER, help=argparse.SUPPRESS)
    parser.add_argument("--mistakes", type=Path, default=FOLDER, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    args = parse(words)
    try:
        mistakes = read_mistakes(args.mistakes, args.room, args.name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    ledger = Ledger(args.ledger)
    if args.list:
        for mistake in mistakes:
            row = ledger.row(mistake)
            print(f"{mistake.room}/{mistake.name} ({mistake.kind}): {row.line if row else 'not tried'}")
        return 0
    done = {CAUGHT, ALIVE} | ({ALIVE_NEAR} if args.near else set())
    waiting = [m for m in mistakes if args.again or (row := ledger.row(m)) is None or row.result not in done]
    failed = run(waiting, ledger, args.jobs, args.limit, args.near, args.root) if waiting else 0
    print("\n".join(table(mistakes, ledger)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
