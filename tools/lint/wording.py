"""Checks the words of names, docstrings and pages. Ceilings limit the findings and only go down.

python tools/lint/wording.py                 check, as `make lint` does
python tools/lint/wording.py megatron/data   list all findings under a folder or file
python tools/lint/wording.py --table         print numbers by room and page, and the commonest names
python tools/lint/wording.py --write         lower the ceilings to the numbers of this tree

Names: a function, class, argument, variable, attribute or file; counted once in each scope that binds it.
The lists of words and exceptions are in tools/lint/words.toml.
Docstrings: the first sentence has at most 25 words, and does not begin with a word such as What or Of.
Pages: at most 1.5 relative words per 100 words, and 35 words per sentence. Code is left out.
"""

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.lint.ceilings import CEILINGS, Numbers, exceeded, lowered, read_ceilings, too_high, write_ceilings  # noqa: E402
from tools.lint.docstrings import check_docstrings  # noqa: E402
from tools.lint.finding import Finding, room_of_file, tracked_files  # noqa: E402
from tools.lint.names import WordLists, check_names  # noqa: E402
from tools.lint.pages import read_page  # noqa: E402

ALLOWED_RELATIVE = 1.5  # per 100 words, on any page
NAMES, LONG_DOCSTRINGS, FRAGMENTS = "names", "long_docstrings", "docstring_fragments"
RELATIVE, LONG_SENTENCES = "relative_words_per_100", "long_sentences"
KINDS = (NAMES, LONG_DOCSTRINGS, FRAGMENTS, RELATIVE, LONG_SENTENCES)


@dataclass
class Survey:
    """The result of checking all files: findings by kind, and numbers by room and page.

    relative: relative words (what, that, ...) per 100 words, by page.
    names, docstrings: how many names and docstrings each room has.
    """

    findings: dict[str, list[Finding]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    relative: dict[str, float] = field(default_factory=dict)
    names: Counter[str] = field(default_factory=Counter)
    docstrings: Counter[str] = field(default_factory=Counter)

    def counts(self) -> Numbers:
        """Returns the numbers of findings that ceilings.toml limits, by kind, then by room or page."""
        numbers: dict[str, dict[str, float]] = {kind: defaultdict(int) for kind in KINDS}
        for kind, findings in self.findings.items():
            for finding in findings:
                numbers[kind][finding.path if kind == LONG_SENTENCES else room_of_file(finding.path)] += 1
        numbers[RELATIVE] = {page: rate for page, rate in self.relative.items() if rate > ALLOWED_RELATIVE}
        return numbers


def check_module(root: Path, words: WordLists, path: str) -> tuple[int, list[Finding], int, list[Finding]]:
    """Returns (number of names in a file, findings on names, number of docstrings, findings on
    docstrings)."""
    tree = ast.parse((root / path).read_text(encoding="utf-8"), path)
    return *check_names(path, tree, words), *check_docstrings(path, tree)


def survey(root: Path, words: WordLists) -> Survey:
    """Checks all Python files below `root`, and all Markdown pages outside tests/."""
    result = Survey()
    paths = tracked_files(root, "*.py")
    with ProcessPoolExecutor() as pool:
        modules = list(pool.map(partial(check_module, root, words), paths, chunksize=50))
    for path, (names, broken_names, docstrings, broken_docstrings) in zip(paths, modules, strict=True):
        result.names[room_of_file(path)] += names
        result.docstrings[room_of_file(path)] += docstrings
        result.findings[NAMES] += broken_names
        for finding in broken_docstrings:
            result.findings[FRAGMENTS if finding.rule.startswith("begins") else LONG_DOCSTRINGS].append(finding)
    for path in tracked_files(root, "*.md"):
        if not path.startswith("tests/"):
            page = read_page(path, (root / path).read_text(encoding="utf-8"))
            result.relative[path] = page.relative_per_100
            result.findings[LONG_SENTENCES] += page.long
    return result


def commonest(findings: Iterable[Finding], num_names: int) -> list[str]:
    """Returns a line for each of the `num_names` names with the most findings: count, name, first place."""
    groups: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.subject].append(finding)
    ranked = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))[:num_names]
    return [f"{len(group):>6}  {name:<20} {group[0].path}:{group[0].line}" for name, group in ranked]


def table(result: Survey) -> str:
    """Returns the survey as a text table by room, a table by page, and the commonest names with findings."""
    counts = result.counts()
    lines = [f"{'room':<34}{'names':>7}{'bad':>6}{'share':>9}{'docstrings':>12}{'long':>6}{'fragments':>11}"]

    def row(name: str, *numbers: int) -> str:
        names, bad, docstrings, long, fragments = numbers
        return f"{name:<34}{names:>7}{bad:>6}{bad / max(names, 1):>9.2%}{docstrings:>12}{long:>6}{fragments:>11}"

    def numbers_of(rooms: Sequence[str]) -> list[int]:
        tables = (result.names, counts[NAMES], result.docstrings, counts[LONG_DOCSTRINGS], counts[FRAGMENTS])
        return [int(sum(numbers.get(room, 0) for room in rooms)) for numbers in tables]

    rooms = sorted(result.names)
    lines += [row(room, *numbers_of([room])) for room in rooms]
    lines.append(row("all but tests", *numbers_of([room for room in rooms if room.split("/")[0] != "tests"])))
    lines += [row("all", *numbers_of(rooms)), "", f"{'page':<48}{'relative words per 100':>24}{'long sentences':>16}"]
    long_sentences = counts[LONG_SENTENCES]
    lines += [f"{page:<48}{rate:>24}{long_sentences.get(page, 0):>16}" for page, rate in result.relative.items()]
    lines += ["", "commonest names, and where the first of each is:", *commonest(result.findings[NAMES], 60)]
    return "\n".join(lines) + "\n"


def failures(counts: Numbers, ceilings: Numbers) -> list[str]:
    """Returns an error line for each count above its ceiling, and for each ceiling above its count."""
    lines = []
    for kind, place, number, ceiling in exceeded(counts, ceilings):
        hint = "" if kind == RELATIVE else f"; python tools/lint/wording.py {place} lists them"
        lines.append(f"{place}: {kind} {number}, ceiling {ceiling}{hint}")
    for kind, place, number, ceiling in too_high(counts, ceilings):
        lines.append(
            f"{place}: {kind} {number}, ceiling {ceiling}: lower the ceiling: python tools/lint/wording.py --write"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="list the findings under these folders or files")
    parser.add_argument("--table", action="store_true", help="print the numbers of this tree by room and page")
    parser.add_argument("--write", action="store_true", help="lower the ceilings to the numbers of this tree")
    options = parser.parse_args(argv)
    result = survey(ROOT, WordLists.read())
    if options.paths:
        folders = [(Path.cwd() / path).resolve() for path in options.paths]
        for finding in (finding for kind in KINDS for finding in result.findings[kind]):
            if any((ROOT / finding.path).is_relative_to(folder) for folder in folders):
                sys.stdout.write(f"{finding}\n")
        return 0
    if options.table:
        sys.stdout.write(table(result))
        return 0
    counts, ceilings = result.counts(), read_ceilings(CEILINGS)
    if options.write:
        ceilings = lowered(counts, ceilings)
        write_ceilings(CEILINGS, ceilings)
    lines = failures(counts, ceilings)
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    run_command(main)
