"""Folders of a run that are not on this machine: `save` and `load` as scheme://bucket/folder."""

import difflib
import getpass
import re
import tempfile
from pathlib import Path

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(place: str | None) -> str | None:
    """`s3` of s3://bucket/run; None for a folder, and for hf://, which names a model on the Hub."""
    match = _SCHEME.match(place or "")
    return match[1] if match is not None and match[1] != "hf" else None


def is_remote(place: str | None) -> bool:
    """Whether a path is one that fsspec reaches."""
    return scheme_of(place) is not None


def staging_folder(place: str, staging: str | None) -> str:
    """The local folder that stands for a remote one. staging: `remote_staging`, else a folder of the user's in the
    temporary folder."""
    scheme, _, path = place.partition("://")
    parts = [re.sub(r"[^\w.=-]", "_", part) for part in path.split("/") if part]
    if staging is None:
        staging = str(Path(tempfile.gettempdir()) / f"neox-remote-{getpass.getuser()}")
    return str(Path(staging, scheme, *("_" if part in (".", "..") else part for part in parts)))


def problem_of(place: str) -> str | None:
    """What is wrong with a remote path, in words."""
    from fsspec import available_protocols  # comes with torch

    scheme, path = scheme_of(place) or "", place.partition("://")[2]
    known = sorted(set(available_protocols()))
    if scheme not in known:
        near = difflib.get_close_matches(scheme.lower(), known, n=3)
        meant = (
            f"did you mean {' or '.join(f'{name}://' for name in near)}?" if near else "such as s3://, gs://, abfs://"
        )
        return f"{place}: fsspec knows no {scheme}://; {meant}"
    if not path.strip("/") or (path.startswith("/") and scheme not in ("file", "local")):
        return f"{place}: names no bucket; write {scheme}://BUCKET/FOLDER"
    return None
