"""The seeded mistakes, read from this folder's tables."""

import hashlib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
KINDS = ("slip", "generated")


@dataclass(frozen=True)
class Mistake:
    """One change of the code that some test must notice.

    room: the stem of its table. kind: "slip", as a colleague would make it, or "generated". wrong: what a
    user would see go wrong. function: qualified name of the function or class that holds `before`, within its
    module; empty for the top level of some module. before, after: source text of an expression or of whole
    statements; an empty `after` deletes the statements. occurrence: which one, counted from 1, where the
    function holds several. tests: files that should notice it, which run first where they are there.
    """

    room: str
    name: str
    kind: str
    wrong: str
    function: str
    before: str
    after: str
    occurrence: int = 0
    tests: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Changes with what is done to the code, not with the words about it."""
        text = "\0".join((self.function, self.before, self.after, str(self.occurrence)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_mistakes(folder: Path = FOLDER, rooms: Iterable[str] = (), names: Iterable[str] = ()) -> list[Mistake]:
    """Reads the tables in order, slips first; only those of `rooms` and `names` where given.

    Raises ValueError for an unknown room or name, for a kind that is none, and for a name that two mistakes
    have.
    """
    mistakes = [
        Mistake(path.stem, name, **{**table, "tests": tuple(table.get("tests", ()))})
        for path in sorted(folder.glob("*.toml"))
        for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items()
    ]
    known_names = [mistake.name for mistake in mistakes]
    if repeated := sorted({name for name in known_names if known_names.count(name) > 1}):
        raise ValueError(f"two mistakes are named {', '.join(repeated)}")
    if wrong_kind := [mistake.name for mistake in mistakes if mistake.kind not in KINDS]:
        raise ValueError(f"kind of {', '.join(wrong_kind)} is none of {', '.join(KINDS)}")
    for requested, existing in ((rooms, {mistake.room for mistake in mistakes}), (names, set(known_names))):
        if unknown := sorted(set(requested) - existing):
            raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(sorted(existing))}")
    rooms, names = set(rooms), set(names)
    chosen = [m for m in mistakes if (not rooms or m.room in rooms) and (not names or m.name in names)]
    return sorted(chosen, key=lambda mistake: KINDS.index(mistake.kind))
