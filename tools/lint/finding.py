"""Findings of the wording rules, and the files they are looked for in."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finding:
    """One broken rule. `subject` is the name, or the opening of the docstring or sentence."""

    path: str
    line: int
    subject: str
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.subject}: {self.rule}"


def tracked_files(root: Path, *patterns: str) -> list[str]:
    """Returns sorted paths, relative to `root`, of files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(path for path in set(listing.splitlines()) if (root / path).is_file())


def room_of_file(path: str) -> str:
    """Returns the outer two folders of a path, or `.` for a file of the root."""
    folders = path.split("/")[:-1]
    return "/".join(folders[:2]) or "."
