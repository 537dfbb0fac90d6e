"""Paths that are not on this machine: `save` and `load` as scheme://bucket/folder, and data that must be
copied."""

import difflib
import getpass
import re
import tempfile
from pathlib import Path

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(path: str | None) -> str | None:
    """`s3` of s3://bucket/run; None for a folder, and for hf://, which names a model on the Hub."""
    match = _SCHEME.match(path or "")
    return match[1] if match is not None and match[1] != "hf" else None


def is_remote(path: str | None) -> bool:
    """Whether a path is scheme://bucket/folder, which fsspec reaches, and no folder of this machine."""
    return scheme_of(path) is not None


def staging_folder(path: str, staging: str | None) -> str:
    """The local folder that stands for a remote one. staging: `remote_staging`, else a folder of the user's
    in the temporary folder."""
    scheme, _, inner = path.partition("://")
    parts = [re.sub(r"[^\w.=-]", "_", part) for part in inner.split("/") if part]
    if staging is None:
        staging = str(Path(tempfile.gettempdir()) / f"neox-remote-{getpass.getuser()}")
    return str(Path(staging, scheme, *("_" if part in (".", "..") else part for part in parts)))


def remote_path_error(path: str) -> str | None:
    """What is wrong with a remote path, in words; None if nothing is."""
    from fsspec import available_protocols  # comes with torch

    scheme, inner = scheme_of(path) or "", path.partition("://")[2]
    known = sorted(set(available_protocols()))
    if scheme not in known:
        near = difflib.get_close_matches(scheme.lower(), known, n=3)
        meant = (
            f"did you mean {' or '.join(f'{name}://' for name in near)}?" if near else "such as s3://, gs://, abfs://"
        )
        return f"{path}: fsspec knows no {scheme}://; {meant}"
    if not inner.strip("/") or (inner.startswith("/") and scheme not in ("file", "local")):
        return f"{path}: names no bucket; write {scheme}://BUCKET/FOLDER"
    return None


def remote_data_error(path: str) -> str | None:
    """What to do with data in an object store, which are mapped into memory here; None for a local path."""
    scheme = scheme_of(path)
    if scheme is None:
        return None
    if scheme.lower() in ("file", "local"):
        return f"{path}: a path of this machine; write it without the scheme: {path.partition('://')[2]}"
    return (
        f"{path}: data are mapped from a file system, not read from an object store; copy PREFIX.idx and PREFIX.bin "
        "to a disk that each machine sees (aws s3 cp, or fsspec's get), or mount the bucket, and name that path"
    )
