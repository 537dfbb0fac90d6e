"""The outcome of each mistake, written after each, so that a run goes on where the last one ended."""

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutations.mistakes import FOLDER, Mistake

LEDGER = FOLDER / "ledger.json"
CAUGHT, ALIVE, ALIVE_NEAR = "caught", "alive", "alive among near tests"


@dataclass(frozen=True)
class Row:
    """One mistake's outcome.

    test: the first that failed; how: "failed", "not collected", "hung" or "crashed"; tests: how many passed
    before the end; digest: of the mistake it was.
    """

    name: str
    result: str
    test: str
    how: str
    tests: int
    seconds: int
    commit: str
    digest: str

    @property
    def line(self) -> str:
        if self.result == CAUGHT:
            words = "" if self.how == "failed" else f" ({self.how})"
            return f"caught by {self.test}{words} in {self.seconds} s"
        return f"{self.result.upper()} after {self.seconds} s ({self.tests} tests)"


class Ledger:
    """Rows by name, in a file with a line for each, to which several processes may add."""

    def __init__(self, path: Path = LEDGER) -> None:
        self.path = path
        self.rows = self._read()

    def _read(self) -> dict[str, Row]:
        if not self.path.exists():
            return {}
        return {name: Row(name, **row) for name, row in json.loads(self.path.read_text()).items()}

    def row(self, mistake: Mistake) -> Row | None:
        """Returns the mistake's row; None if its text changed since."""
        row = self.rows.get(mistake.name)
        return row if row is not None and row.digest == mistake.digest else None

    def add(self, row: Row) -> None:
        """Writes the whole file under another name, then renames."""
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self.rows = {**self._read(), row.name: row}
            lines = []
            for name, stored in sorted(self.rows.items()):
                fields = {key: value for key, value in asdict(stored).items() if key != "name"}
                lines.append(f"{json.dumps(name)}: {json.dumps(fields)}")
            temporary = self.path.with_suffix(".new")
            temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            os.replace(temporary, self.path)
        finally:
            os.close(folder)
