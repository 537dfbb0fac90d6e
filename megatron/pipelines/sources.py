"""Fetches the sources of a data stage (files and datasets) into data/raw, unless the same content is
there."""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.data.downloads import DownloadError, download
from megatron.data.files import temporary, write_json
from megatron.neox_arguments.addresses import without_secrets
from megatron.neox_arguments.optional_packages import import_optional
from megatron.neox_arguments.values.json_text import parse_json
from megatron.neox_arguments.values.local_paths import with_home
from megatron.pipelines.definition import Source
from megatron.pipelines.digests import digest, file_digests, files_of, numbered
from megatron.pipelines.errors import PipelineError, cannot_write

RAW, NOTES = Path("data/raw"), Path("data/raw/sources.json")


@dataclass(frozen=True)
class Fetched:
    """The entry of a fetched source in data/raw/sources.json.

    origin: where the source came from, as text without secrets.
    sha256: SHA-256 of the file; for a folder, of the JSON of its files' digests.
    bytes, files: total size in bytes, and number of files.
    fetched: when it was fetched, in seconds since 1970.
    identity: fields of the source in pipeline.yml when it was fetched.
    revision: commit of the Hub repository; None for other sources.
    """

    name: str
    origin: str
    license: str
    sha256: str
    bytes: int
    files: int
    fetched: float
    identity: Mapping[str, Any]
    revision: str | None = None


def read_notes(folder: Path) -> dict[str, Fetched]:
    """Reads data/raw/sources.json: the entries by the name of the source; {} if the file does not exist.

    Raises PipelineError if the file cannot be read. folder: the pipeline's folder."""
    try:
        notes = parse_json((folder / NOTES).read_text(encoding="utf-8"))
        fetched = {name: Fetched(**note) for name, note in notes.items()}
        # Earlier versions recorded full URLs with secrets; `fetch_sources` writes the entries again without
        # them.
        return {name: replace(note, origin=without_secrets(note.origin)) for name, note in fetched.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as problem:
        raise PipelineError(
            f"{folder / NOTES}: cannot be read ({problem}); remove the file; all sources are then checked again"
        ) from None


def fetch_sources(folder: Path, sources: tuple[Source, ...], say: Callable[[str], None]) -> dict[str, str]:
    """Fetches every source into data/raw unless it is complete there. Returns the SHA-256 of each, by name.

    A source is complete if its content has the SHA-256 in sources.json or in pipeline.yml. Content of a Hub
    source that has neither is accepted as it is. Any other content under its name is renamed, and the source
    is fetched. An interrupted download is continued. folder: the pipeline's folder.

    Raises PipelineError if a source cannot be fetched, or does not have the `sha256` of pipeline.yml.
    """
    notes = read_notes(folder)
    for source in sources:
        done = _existing(folder, source, notes.get(source.name))
        if done is not None:
            say(f"{source.name}: is there already ({done.bytes / 1e6:,.1f} MB, sha256 {done.sha256[:12]})")
        else:
            done = _fetch(folder, source, say)
            size = f"{done.files} file{'s' * (done.files > 1)}, {done.bytes / 1e6:,.1f} MB"
            say(f"{source.name}: fetched {size}, sha256 {done.sha256[:12]}, license {done.license}")
        if notes.get(source.name) != done:
            notes[source.name] = done
            write_json(folder / NOTES, {name: asdict(note) for name, note in notes.items()})
    return {source.name: notes[source.name].sha256 for source in sources}


def pending_sources(folder: Path, sources: tuple[Source, ...]) -> list[str]:
    """Returns the names of the sources that must be fetched; changes nothing.

    They are missing in data/raw or in sources.json, or their fields in pipeline.yml or local files
    changed."""
    notes, names = read_notes(folder), []
    for source in sources:
        note = notes.get(source.name)
        files = files_of(folder, str(RAW / source.name))
        if note is None or not files or note.identity != _identity(folder, source):
            names.append(source.name)
    return names


def _identity(folder: Path, source: Source) -> dict[str, Any]:
    """Returns the fields that identify a source, for comparison with sources.json.

    For a source with `path` they include the digests of its files."""
    identity = {key: value for key, value in asdict(source).items() if value is not None and key != "license"}
    if source.url is not None:  # without the signature, which differs each time; the SHA-256 identifies the content
        identity["url"] = source.origin
    if source.path is not None:
        place = _place(folder, source)
        if not files_of(folder, str(place)):
            raise PipelineError(f"{source.name}: {place}: no such file or folder; correct `path`")
        identity["content"] = file_digests(folder, [str(place)])
    return parse_json(json.dumps(identity))


def _place(folder: Path, source: Source) -> Path:
    return folder / with_home(source.path or "")


def _existing(folder: Path, source: Source, note: Fetched | None) -> Fetched | None:
    """Returns the entry for a source that is already complete in data/raw; None if it must be fetched.

    If other content has the source's name, renames that content. note: the source's entry in sources.json.
    """
    target = folder / RAW / source.name
    if not files_of(folder, str(RAW / source.name)):
        return None
    present = _present(folder, source, _identity(folder, source))
    if note is not None and (note.identity, note.sha256) == (present.identity, present.sha256):
        return replace(note, license=source.license)
    # The content was put there by hand, or by a run that was killed before it wrote sources.json.
    unknown = note is None and source.sha256 is None and source.path is None
    if source.sha256 == present.sha256 or unknown:
        return present
    _rename_old(target)
    return None


def _present(folder: Path, source: Source, identity: Mapping[str, Any], revision: str | None = None) -> Fetched:
    """Returns the entry for sources.json of the content that a source has in data/raw now."""
    path = RAW / source.name
    files, digests = files_of(folder, str(path)), file_digests(folder, [str(path)])
    content = next(iter(digests.values())) if (folder / path).is_file() else digest(digests)
    size, now = sum(file.stat().st_size for file in files), time.time()
    return Fetched(source.name, source.origin, source.license, content, size, len(files), now, identity, revision)


def _rename_old(target: Path) -> None:
    """Renames `target` to NAME.oldN, to make room for new content; if it is a symbolic link, deletes it
    instead."""
    if target.is_symlink():
        target.unlink()
    else:
        os.replace(target, numbered(target, "old"))


def _fetch(folder: Path, source: Source, say: Callable[[str], None]) -> Fetched:
    target = folder / RAW / source.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise cannot_write(target.parent, problem) from None
    revision, identity = None, _identity(folder, source)
    if source.url is not None:
        try:
            download(source.url, target, say, source.sha256)
        except DownloadError as problem:
            advice = (
                "correct `url` or `sha256` in pipeline.yml"
                if problem.refused
                else f"run again to continue the download, or put the file at {target} by other means"
            )
            raise PipelineError(f"{problem}; {advice}") from None
    elif source.hub is not None:
        revision = _fetch_hub(source, target, say)
    else:
        _link(_place(folder, source), target)
    fetched = _present(folder, source, identity, revision)
    if source.sha256 not in (None, fetched.sha256):
        _rename_old(target)
        raise PipelineError(
            f"{source.name}: {source.origin} has SHA-256 {fetched.sha256}, but pipeline.yml says {source.sha256}; if "
            "the data is right, correct sha256 there"
        )
    return fetched


def _link(place: Path, target: Path) -> None:
    """Makes `target` a symbolic link to `place`. The data is not copied, because it may have terabytes."""
    link = temporary(target)
    try:
        # Within the pipeline's folder the link is relative, so that the folder can be moved or copied as a
        # whole.
        is_internal = place.resolve().is_relative_to(target.parents[2].resolve())
        to = os.path.relpath(place.resolve(), target.parent.resolve()) if is_internal else place.resolve()
        link.symlink_to(to, target_is_directory=place.is_dir())
        os.replace(link, target)
    except OSError as problem:
        raise PipelineError(f"{target}: cannot be written ({problem.strerror or problem})") from None
    finally:
        link.unlink(missing_ok=True)


def _fetch_hub(source: Source, target: Path, say: Callable[[str], None]) -> str:
    """Downloads a source from the Hub into the folder `target`, and returns the repository's commit.

    An interrupted download is continued. Raises PipelineError if the download fails.
    """
    need = PipelineError(f"{source.name}: `hub` needs huggingface_hub; install: pip install 'neox[hf]'")
    hub = import_optional("huggingface_hub", need)
    unfinished = target.with_name(f".{target.name}.part")
    try:
        info = hub.HfApi().repo_info(source.hub, repo_type=source.hub_type, revision=source.revision)
        say(f"{source.hub}: commit {info.sha[:12]}")
        hub.snapshot_download(
            source.hub, repo_type=source.hub_type, revision=info.sha, local_dir=unfinished,
            allow_patterns=list(source.files) if source.files is not None else None,
        )  # fmt: skip
    except Exception as problem:  # errors of huggingface_hub, httpx and requests have no common base class
        text = without_secrets(" ".join(str(problem).split()))[:300]
        raise PipelineError(
            f"{source.name}: {source.hub} cannot be downloaded from the Hub ({text}); check the name, set HF_TOKEN, "
            "unset HF_HUB_OFFLINE"
        ) from None
    shutil.rmtree(unfinished / ".cache", ignore_errors=True)
    if not any(file.is_file() for file in unfinished.rglob("*")):
        with suppress(OSError):
            shutil.rmtree(unfinished)
        raise PipelineError(
            f"{source.name}: {source.hub} on the Hub has no files, or no file matches the patterns in `files`"
        )
    os.replace(unfinished, target)
    return str(info.sha)
