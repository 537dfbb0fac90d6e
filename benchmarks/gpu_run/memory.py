"""What the tables of earlier runs remember of each part: on which card it passed, and with which code."""

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
    """A part that passed, as a table has it. date: `2026-11-27`; code: "" in tables without digests."""

    table: str
    date: str
    card: str
    code: str
    seconds: float


@dataclass(frozen=True)
class Memory:
    """passes: by part, the newest first. tests: by part, the names of tests that passed in any table. cores:
    by card, of the newest machine that had one."""

    passes: Mapping[str, Sequence[Pass]]
    tests: Mapping[str, frozenset[str]]
    cores: Mapping[str, int]

    def card(self, beginning: str) -> str:
        """The card of a table whose name begins so (h100: h100-80gb-hbm3), else what was given."""
        return next((card for card in sorted(self.cores) if f"{card}-".startswith(f"{beginning}-")), beginning)

    def seconds(self, part: Part, card: str | None) -> float:
        """How long the part last took on such a card; its own estimate where it has not passed there."""
        there = [one for one in self.passes.get(part.name, ()) if one.card == card]
        return there[0].seconds if there else part.typical_s


def remember(tables: Iterable[Path], kind: str) -> Memory:
    """Read the tables of a kind ("gpu" or "ablation"). Raises ValueError for a file that is no table."""
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
                one = Pass(path.name, table["date"], card, row.get("code", ""), row["seconds"])
                passes.setdefault(name, []).append(one)
            passed = {test["name"] for test in row["tests"] if test["outcome"] == "passed"}
            tests[name] = tests.get(name, frozenset()) | passed
            if "cores" in (row["result"] or {}):
                cores.setdefault(card, row["result"]["cores"])
    return Memory(passes, tests, cores)


def codes(parts: Sequence[Part], root: Path) -> dict[str, str]:
    """A digest for each part: of its command, its variables, the files that the command names, and all Python
    files that these depend on. "" for all where git does not list the files of the tree.

    Other data files do not count: strings name READMEs and the golden files of other tests too.
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
