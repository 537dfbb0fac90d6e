"""Small file helpers: durable writes and hashes that do not read a whole file at once."""

import hashlib
import os
from pathlib import Path


def sync(path: str | Path) -> None:
    """Force a file or folder to disk, so that a rename after it never publishes half of it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary(path: str | Path) -> Path:
    """A name beside `path` (same file system, so that `os.replace` is atomic), different in every process."""
    path = Path(path)
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def sha256(path: str | Path) -> str:
    """Hex SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
