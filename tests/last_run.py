"""The record of the last full run of `make test-all`: tests/last_full_run.json, which that target writes.

commit: of the tree that was tested; `make test CHANGED=1` (.ci/run) compares with it. failed: test functions
that failed there, which no later run leaves out. seconds: per kind of test (ordinary, more, product) and
room. expensive: test functions whose tests took EXPENSIVE_S or more together.
"""

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("last_full_run.json")
EXPENSIVE_S = 2.0


@dataclass(frozen=True)
class FullRun:
    commit: str = ""
    failed: list[str] = field(default_factory=list)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    expensive: dict[str, float] = field(default_factory=dict)


def read_record(path: Path = RECORD) -> FullRun:
    """An empty one where there is no file yet."""
    return FullRun(**json.loads(path.read_text())) if path.exists() else FullRun()


def write_record(run: FullRun, path: Path = RECORD) -> None:
    rounded = {kind: {room: round(s) for room, s in sorted(rooms.items())} for kind, rooms in run.seconds.items()}
    expensive = {name: round(s, 1) for name, s in sorted(run.expensive.items()) if s >= EXPENSIVE_S}
    content = {"commit": run.commit, "failed": sorted(run.failed), "seconds": rounded, "expensive": expensive}
    path.write_text(json.dumps(content, indent=1) + "\n")


def function_of(nodeid: str) -> str:
    """Without a case's parameters."""
    return nodeid.partition("[")[0]


def git(*words: str, root: Path = ROOT) -> str | None:
    """Returns the output of git, or None where it fails."""
    try:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def clean_commit(root: Path = ROOT) -> str | None:
    """The commit checked out, or None where files differ from it."""
    status = git("status", "--porcelain", root=root)
    return None if status is None or status.strip() else (git("rev-parse", "HEAD", root=root) or "").strip() or None


def changed_files(commit: str, root: Path = ROOT) -> list[str] | None:
    """Files that differ from a commit, new and removed ones too; None where it is not an ancestor."""
    if not commit or git("merge-base", "--is-ancestor", commit, "HEAD", root=root) is None:
        return None
    differing = git("diff", "--name-only", "-z", "--no-renames", commit, root=root)
    untracked = git("ls-files", "-z", "--others", "--exclude-standard", root=root)
    if differing is None or untracked is None:
        return None
    return sorted({path for path in (differing + untracked).split("\0") if path})
