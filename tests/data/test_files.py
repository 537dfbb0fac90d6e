"""Hashes that are kept: read again whenever a file may have changed."""

import hashlib
import os
from pathlib import Path

import pytest

from megatron.data import files
from megatron.data.files import cached_sha256


def test_a_hash_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, notes = tmp_path / "a.bin", tmp_path / "notes"
    read: list[str] = []
    sha256 = files.sha256

    def count(path: str | Path) -> str:
        read.append(str(path))
        return sha256(path)

    def num_reads() -> int:
        """How often the file has been read by now."""
        assert cached_sha256(data, notes) == hashlib.sha256(data.read_bytes()).hexdigest()
        return len(read)

    monkeypatch.setattr(files, "sha256", count)
    monkeypatch.setattr(files, "_SETTLED", 10**18)
    data.write_bytes(b"one")
    assert (num_reads(), num_reads()) == (1, 2) and not notes.exists(), "it has only just been written"
    monkeypatch.setattr(files, "_SETTLED", -1)
    assert (num_reads(), num_reads(), num_reads()) == (3, 3, 3)
    old_stat = data.stat()
    data.write_bytes(b"two")
    os.utime(data, ns=(old_stat.st_atime_ns, old_stat.st_mtime_ns))
    assert data.stat().st_mtime_ns == old_stat.st_mtime_ns and (num_reads(), num_reads()) == (4, 4), (
        "as `cp -p` leaves it"
    )
    (tmp_path / "link").symlink_to(data)
    assert cached_sha256(tmp_path / "link", notes) and len(read) == 4, "the same file by another name"
    next(notes.iterdir()).write_text('{"path": ')
    assert (num_reads(), num_reads()) == (5, 5), "half a note is none"
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError()))
    data.write_bytes(b"three")
    assert (num_reads(), num_reads()) == (6, 7), "where no note can be written it is read every time"
