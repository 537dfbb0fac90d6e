"""Reads and checks remote paths such as s3://bucket/folder, and finds local folders for their files."""

import difflib
import getpass
import re
import tempfile
from pathlib import Path

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(path: str | None) -> str | None:
    """Returns the scheme of a remote path: s3://bucket/run gives `s3`. Returns None for a local folder, and
    for hf:// (a model on the Hub)."""
    match = _SCHEME.match(path or "")
    return match[1] if match is not None and match[1] != "hf" else None


def is_remote(path: str | None) -> bool:
    """Returns whether a path is remote (SCHEME://BUCKET/FOLDER, read by fsspec), not a local folder or hf://."""
    return scheme_of(path) is not None


def staging_folder(path: str, staging: str | None) -> str:
    """Returns the local folder that holds copies of a remote path's files before uploads and after downloads.

    staging: the key `remote_staging`; None: a folder for this user in the system's temporary folder.
    """
    scheme, _, inner = path.partition("://")
    parts = [re.sub(r"[^\w.=-]", "_", part) for part in inner.split("/") if part]
    if staging is None:
        staging = str(Path(tempfile.gettempdir()) / f"neox-remote-{getpass.getuser()}")
    return str(Path(staging, scheme, *("_" if part in (".", "..") else part for part in parts)))


def remote_path_error(path: str) -> str | None:
    """Returns an error message if a remote path cannot be used (unknown scheme, or no bucket), else None."""
    from fsspec import available_protocols  # comes with torch

    scheme, inner = scheme_of(path) or "", path.partition("://")[2]
    protocols = sorted(set(available_protocols()))
    if scheme not in protocols:
        similar = difflib.get_close_matches(scheme.lower(), protocols, n=3)
        suggestion = (
            f"did you mean {' or '.join(f'{name}://' for name in similar)}?"
            if similar
            else "such as s3://, gs://, abfs://"
        )
        return f"{path}: fsspec knows no {scheme}://; {suggestion}"
    if not inner.strip("/") or (inner.startswith("/") and scheme not in ("file", "local")):
        return f"{path}: names no bucket; write {scheme}://BUCKET/FOLDER"
    return None


def remote_data_error(path: str) -> str | None:
    """Returns an error message for data in an object store, which cannot be memory-mapped; None for a local
    path."""
    scheme = scheme_of(path)
    if scheme is None:
        return None
    if scheme.lower() in ("file", "local"):
        return f"{path}: is a path of this machine; write it without the scheme: {path.partition('://')[2]}"
    return (
        f"{path}: data cannot be read from an object store, because files are memory-mapped; copy PREFIX.idx and "
        "PREFIX.bin to a disk that each machine sees (aws s3 cp, or fsspec's get), or mount the bucket, and name that "
        "path"
    )
