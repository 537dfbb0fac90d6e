"""Finds the child processes of a process (Linux)."""

from contextlib import suppress
from pathlib import Path


def children(parent: int) -> set[int]:
    """Returns the ids of the child processes of the process `parent`; an empty set outside Linux."""
    pids: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            # The state and the parent's id follow the name, which may hold any characters.
            if int(stat.read_bytes().rpartition(b")")[2].split()[1]) == parent:
                pids.add(int(stat.parent.name))
    return pids
