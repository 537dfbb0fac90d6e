"""Reads from the tables of earlier runs on which card, and with which code, each part passed."""

import hashlib
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_run import results
from benchmarks.gpu_run.parts import Part
from tests.import_graph import ImportGraph


@dataclass(frozen=True)
class Pass:
    """One success of a part in an earlier run.

    table: name of the results file. date: as `2026-11-27`. code: digest of the part's files (see `codes`); ""
    if the table has none."""

    table: str
    date: str
    card: str
    code: str
    seconds: float


@dataclass(frozen=True)
class Memory:
    """The results of earlier runs.

    passes: successes by part, the newest first. tests: by part, the names of tests that passed in any table.
    cores: CPU cores by card, of the newest machine with that card.
    """

    passes: Mapping[str, Sequence[Pass]]
    tests: Mapping[str, frozenset[str]]
    cores: Mapping[str, int]

    def card(self, beginning: str) -> str:
        """Returns the known card that begins with `beginning` (h100: h100-80gb-hbm3), else `beginning`."""
        return next((card for card in sorted(self.cores) if f"{card}-".startswith(f"{beginning}-")), beginning)

    def seconds(self, part: Part, card: str | None) -> float:
        """Returns the seconds of the part's newest success on this card, else the part's own estimate."""
        passes_on_card = [item for item in self.passes.get(part.name, ()) if item.card == card]
        return passes_on_card[0].seconds if passes_on_card else part.typical_s


def remember(tables: Iterable[Path], kind: str) -> Memory:
    """Reads the results files of runs of this kind ("gpu" or "ablation").

    Raises ValueError for a file that is not a results file."""
    read = {path: results.read(path) for path in tables}
    newest_first = sorted(
        ((path, table) for path, table in read.items() if table["kind"] == kind),
        key=lambda item: (item[1]["date"], item[0].name),
        reverse=True,
    )
    passes: dict[str, list[Pass]] = {}
    tests: dict[str, frozenset[str]] = {}
    cores: dict[str, int] = {}
    for path, table in newest_first:
        card = results.card_of(table["device"])
        for row in table["parts"]:
            name = row["name"]
            if row["state"] == "passed":
                passed_part = Pass(path.name, table["date"], card, row.get("code", ""), row["seconds"])
                passes.setdefault(name, []).append(passed_part)
            passed = {test["name"] for test in row["tests"] if test["outcome"] == "passed"}
            tests[name] = tests.get(name, frozenset()) | passed
            if "cores" in (row["result"] or {}):
                cores.setdefault(card, row["result"]["cores"])
    return Memory(passes, tests, cores)


def codes(parts: Sequence[Part], root: Path) -> dict[str, str]:
    """Returns a digest for each part, which changes when its code changes.

    It covers the command, its variables, the files that the command names, and all Python files that these
    import. Data files are left out. All digests are "" if git cannot list the files below `root`.
    """
    try:
        graph = ImportGraph.of(root)
    except (OSError, subprocess.CalledProcessError):
        return {part.name: "" for part in parts}
    texts: dict[str, str] = {}
    digests: dict[str, str] = {}
    for part in parts:
        paths = (word.partition("::")[0] for word in part.command)
        starts = {graph.modules.get(path, path) for path in paths} & graph.files
        digest = hashlib.sha256(repr((part.command, sorted(part.env.items()))).encode())
        for path in sorted(graph.dependencies(starts)):
            if path not in texts:
                texts[path] = hashlib.sha256((root / path).read_bytes()).hexdigest()
            digest.update(f"{path} {texts[path]}\n".encode())
        digests[part.name] = digest.hexdigest()[:16]
    return digests
