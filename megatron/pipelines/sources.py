"""The sources of a data stage: files and datasets that come into data/raw, each once, known by its digest."""

import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from megatron.data.files import sha256, sync, temporary, write_json
from megatron.neox_arguments.addresses import without_secrets
from megatron.neox_arguments.optional_packages import import_optional
from megatron.pipelines.definition import Source
from megatron.pipelines.digests import digest, file_digests, files_of
from megatron.pipelines.errors import PipelineError, cannot_write

RAW, NOTES = Path("data/raw"), Path("data/raw/sources.json")
_TIMEOUT_S = 30.0  # without an answer
_TRIES = 4
_PIECE = 1 << 20
_SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class Fetched:
    """What sources.json says of a source. identity: what it was asked for as; sha256: of its content (of a
    folder: of the digests of its files); revision: the commit of a hub dataset."""

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
    """What data/raw holds by name, as it was noted."""
    try:
        notes = json.loads((folder / NOTES).read_text(encoding="utf-8"))
        fetched = {name: Fetched(**note) for name, note in notes.items()}
        # Earlier versions noted whole addresses; `fetch_sources` writes these anew.
        return {name: replace(note, origin=without_secrets(note.origin)) for name, note in fetched.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as problem:
        raise PipelineError(
            f"{folder / NOTES}: cannot be read ({problem}); remove it: sources are looked at again"
        ) from None


def fetch_sources(folder: Path, sources: tuple[Source, ...], say: Callable[[str], None]) -> dict[str, str]:
    """See that data/raw holds every source whole; the SHA-256 of each by name.

    What is there with the digest that was noted, or that the source gives, is left as it is; a download that
    was cut off goes on. Raises PipelineError for what cannot be had, and for a file whose digest is another.
    """
    notes = read_notes(folder)
    for source in sources:
        done = _there(folder, source, notes.get(source.name))
        if done is not None:
            say(f"{source.name}: there already ({done.bytes / 1e6:,.1f} MB, sha256 {done.sha256[:12]})")
        else:
            done = _fetch(folder, source, say)
            size = f"{done.files} file{'s' * (done.files > 1)}, {done.bytes / 1e6:,.1f} MB"
            say(f"{source.name}: {size}, sha256 {done.sha256[:12]}, license {done.license}")
        if notes.get(source.name) != done:
            notes[source.name] = done
            write_json(folder / NOTES, {name: asdict(note) for name, note in notes.items()})
    return {source.name: notes[source.name].sha256 for source in sources}


def pending_sources(folder: Path, sources: tuple[Source, ...]) -> list[str]:
    """The names of sources that are not there as they are asked for now; nothing is changed."""
    notes, names = read_notes(folder), []
    for source in sources:
        note = notes.get(source.name)
        there = files_of(folder, str(RAW / source.name))
        if note is None or not there or note.identity != _identity(folder, source):
            names.append(source.name)
    return names


def _identity(folder: Path, source: Source) -> dict[str, Any]:
    """What a source is asked for as. A path counts by what is there now."""
    identity = {key: value for key, value in asdict(source).items() if value is not None and key != "license"}
    if source.url is not None:  # a signature is made anew each time; the content is known by its SHA-256
        identity["url"] = source.origin
    if source.path is not None:
        place = _place(folder, source)
        if not files_of(folder, str(place)):
            raise PipelineError(f"{source.name}: {place}: there is no such file or folder")
        identity["content"] = file_digests(folder, [str(place)])
    return json.loads(json.dumps(identity))


def _place(folder: Path, source: Source) -> Path:
    return folder / Path(source.path or "").expanduser()


def _there(folder: Path, source: Source, note: Fetched | None) -> Fetched | None:
    """What is there of a source, where it is whole and what was asked for."""
    target = folder / RAW / source.name
    if not files_of(folder, str(RAW / source.name)):
        return None
    identity = _identity(folder, source)
    found, size, count = _content(folder, source.name)
    if note is not None and note.identity == identity and note.sha256 == found:
        return Fetched(**{**asdict(note), "license": source.license})
    unknown = note is None and source.sha256 is None and source.path is None
    if source.sha256 == found or unknown:  # put there by other means, or by a run that was killed before it noted it
        return Fetched(source.name, source.origin, source.license, found, size, count, time.time(), identity)
    _set_aside(target)
    return None


def _content(folder: Path, name: str) -> tuple[str, int, int]:
    """(SHA-256, bytes, files) of what data/raw holds under a name."""
    path = RAW / name
    files = files_of(folder, str(path))
    digests = file_digests(folder, [str(path)])
    one = (folder / path).is_file()
    return next(iter(digests.values())) if one else digest(digests), sum(f.stat().st_size for f in files), len(files)


def _set_aside(target: Path) -> None:
    """What is there under the name and is another thing gets another name; nothing is deleted."""
    if target.is_symlink():
        target.unlink()
        return
    for number in range(1, 1_000_000):
        aside = target.with_name(f"{target.name}.old{number}")
        if not aside.exists():
            os.replace(target, aside)
            return


def _fetch(folder: Path, source: Source, say: Callable[[str], None]) -> Fetched:
    target = folder / RAW / source.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise cannot_write(target.parent, problem) from None
    revision = None
    identity = _identity(folder, source)
    if source.url is not None:
        download(source.url, target, source.sha256 or "", say)
    elif source.hub is not None:
        revision = _fetch_hub(source, target, say)
    else:
        _link(_place(folder, source), target)
    found, size, count = _content(folder, source.name)
    if source.sha256 not in (None, found):
        _set_aside(target)
        raise PipelineError(
            f"{source.name}: {source.origin} has SHA-256 {found}, not {source.sha256}; look whether it is what was "
            "meant, then put that digest into the pipeline"
        )
    return Fetched(source.name, source.origin, source.license, found, size, count, time.time(), identity, revision)


def _link(place: Path, target: Path) -> None:
    """What lies on this machine is not copied: it may be terabytes."""
    link = temporary(target)
    try:
        inside = place.resolve().is_relative_to(target.parents[2].resolve())  # which may be copied as a whole
        to = os.path.relpath(place.resolve(), target.parent.resolve()) if inside else place.resolve()
        link.symlink_to(to, target_is_directory=place.is_dir())
        os.replace(link, target)
    except OSError as problem:
        raise PipelineError(f"{target}: cannot be written ({problem.strerror or problem})") from None
    finally:
        link.unlink(missing_ok=True)


def download(url: str, target: Path, expected: str, say: Callable[[str], None], pause_s: float = 2.0) -> None:
    """Download one file, which appears when it is whole and has its SHA-256. What an interrupted download
    left in `.NAME.part` is gone on with, where the server can. Messages show the address without its
    signature. Raises PipelineError."""
    shown = without_secrets(url)
    part = target.with_name(f".{target.name}.part")
    for attempt in range(1, _TRIES + 1):
        try:
            _receive(url, part, say)
            break
        except urllib.error.HTTPError as problem:
            if problem.code < 500 and problem.code != 429:
                raise PipelineError(f"{shown}: {problem.code} {problem.reason}") from None
            reason: object = problem
        except (OSError, http.client.HTTPException, ValueError) as problem:
            reason = getattr(problem, "reason", None) or problem
        if attempt == _TRIES:
            raise PipelineError(
                f"{shown}: cannot be had ({reason}); put the file at {target} by other means, or run again: what has "
                "come is kept"
            )
        say(f"{shown}: {reason}; tried again in {pause_s * attempt:.0f} s")
        time.sleep(pause_s * attempt)
    found = sha256(part)
    if found != expected:
        part.unlink()
        raise PipelineError(f"{shown}: has SHA-256 {found}, not {expected}; what came is deleted")
    try:
        sync(part)
        os.replace(part, target)
    except OSError as problem:
        raise cannot_write(target, problem) from None


def _receive(url: str, part: Path, say: Callable[[str], None]) -> None:
    have, shown = part.stat().st_size if part.is_file() else 0, without_secrets(url)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as problem:
        if problem.code == 416 and have:  # all of it is there, or more than there is
            length = str(problem.headers.get("Content-Range", "")).rpartition("/")[2]
            if length == str(have):
                return
            part.unlink()
            raise OSError("what was there is no beginning of it") from None
        raise
    with answer:
        goes_on = have and getattr(answer, "status", None) == 206
        size = int(answer.headers.get("Content-Length") or -1)
        whole = size + have if goes_on and size >= 0 else size
        say(f"{shown}: {whole / 1e6:,.1f} MB" + (f", of which {have / 1e6:,.1f} MB are there" if goes_on else ""))
        said = time.monotonic()
        with part.open("ab" if goes_on else "wb", buffering=0) as file:
            while piece := answer.read(_PIECE):
                _write(file, piece, part)
                if time.monotonic() - said > _SAY_EVERY_S:
                    say(f"{shown}: {file.tell() / 1e6:,.1f} MB of {whole / 1e6:,.1f} MB")
                    said = time.monotonic()
            if whole >= 0 and file.tell() != whole:
                raise OSError(f"cut off after {file.tell()} of {whole} bytes")


def _write(file: BinaryIO, piece: bytes, part: Path) -> None:
    """Add to a file. What its disk does not take is no broken connection, which would be tried again."""
    rest = memoryview(piece)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as problem:
        raise cannot_write(part, problem) from None


def _fetch_hub(source: Source, target: Path, say: Callable[[str], None]) -> str:
    """What is on the Hub into a folder; the commit that it is of. huggingface_hub goes on with what
    came."""
    need = PipelineError(f"{source.name}: what is on the Hub needs huggingface_hub: pip install 'neox[hf]'")
    hub = import_optional("huggingface_hub", need)
    unfinished = target.with_name(f".{target.name}.part")
    try:
        info = hub.HfApi().repo_info(source.hub, repo_type=source.hub_type, revision=source.revision)
        say(f"{source.hub}: commit {info.sha[:12]}")
        hub.snapshot_download(
            source.hub, repo_type=source.hub_type, revision=info.sha, local_dir=unfinished,
            allow_patterns=list(source.files) if source.files is not None else None,
        )  # fmt: skip
    except Exception as problem:  # of huggingface_hub, httpx and requests, which have no common base
        text = without_secrets(" ".join(str(problem).split()))[:300]
        raise PipelineError(
            f"{source.name}: {source.hub} cannot be had ({text}); is the name right, HF_TOKEN set, HF_HUB_OFFLINE not?"
        ) from None
    shutil.rmtree(unfinished / ".cache", ignore_errors=True)
    if not any(file.is_file() for file in unfinished.rglob("*")):
        with suppress(OSError):
            shutil.rmtree(unfinished)
        raise PipelineError(f"{source.name}: {source.hub} has no file that `files` names")
    os.replace(unfinished, target)
    return str(info.sha)
