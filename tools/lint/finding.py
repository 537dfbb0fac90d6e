"""Defines a finding of the wording rules, and lists the files in which findings are looked for."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finding:
    """A place where a wording rule is broken. subject: the name, or the first words of the docstring or
    sentence."""

    path: str
    line: int
    subject: str
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.subject}: {self.rule}"


def tracked_files(root: Path, *patterns: str) -> list[str]:
    """Returns the sorted paths, relative to `root`, of files that match git patterns and are not ignored by
    git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(path for path in set(listing.splitlines()) if (root / path).is_file())


def room_of_file(path: str) -> str:
    """Returns the room of a file: its first two folders, such as megatron/data; `.` for a file in the
    root."""
    folders = path.split("/")[:-1]
    return "/".join(folders[:2]) or "."
