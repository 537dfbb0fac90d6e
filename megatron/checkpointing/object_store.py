"""Reads and writes checkpoints in an object store (s3://, gs://, ...) through fsspec.

No other file accesses a store. A store has no rename. A checkpoint is complete if its folder exists and the
mark `.unfinished_<its name>` next to it does not. The mark is written before the first file is sent, and
removed after the last one, the manifest. Then `latest` is written. A checkpoint is also marked before it is
deleted. Marked folders are ignored, and the next save removes them.

fsspec finds credentials in the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...) and its usual files.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from megatron.checkpointing.errors import CheckpointError, DamagedError
from megatron.checkpointing.layout import LATEST, is_tag, model_file, step_of
from megatron.checkpointing.manifest import MANIFEST, Manifest, file_sizes, read_manifest
from megatron.checkpointing.retention import EPHEMERAL
from megatron.checkpointing.tensor_files import readable_size, replace_file
from megatron.data.files import sha256

T = TypeVar("T")
_MARK = ".unfinished_"
HF_CONFIG = "config.json"
_PROBE = ".write_test"
_AT_ONCE = 8  # transfers of small files; fsspec itself sends the parts of a large file in parallel
_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
# Errors that a retry cannot help: this machine's disk or the request is at fault.
_FINAL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTDIR}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "NoAuthHandlerFound"}


class ObjectStore:
    """One folder in an object store (S3 and the like).

    url: the folder's address. patience: for how many seconds a failed call is repeated. Every method raises
        CheckpointError that names the address.
    """

    def __init__(self, url: str, patience: float = 0.0) -> None:
        self.url, self.patience = url.rstrip("/"), patience
        scheme = url.partition("://")[0]
        options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            from fsspec.core import url_to_fs

            # No caches, because other machines write there too.
            self._fs, self._root = url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True, **options)
        except ImportError as problem:
            package = "'neox[remote]'" if scheme in ("s3", "s3a") else "the package that fsspec names"
            raise CheckpointError(f"{url}: {problem}; pip install {package}") from problem
        except Exception as problem:  # each protocol has its own errors
            raise CheckpointError(f"{url}: {_words(problem)}") from problem

    def _call(self, name: str, work: Callable[[], T], missing: Callable[[], T] | None = None) -> T:
        start_time, pause = time.monotonic(), _PAUSE
        address = f"{self.url}/{name}" if name else self.url
        while True:
            try:
                return work()
            except FileNotFoundError as problem:
                if missing is not None:
                    return missing()
                raise CheckpointError(f"{address}: does not exist ({_words(problem)})") from problem
            except PermissionError as problem:
                raise CheckpointError(
                    f"{address}: no permission ({_words(problem)}); check the credentials in the environment"
                ) from problem
            except Exception as problem:  # errors of the store's library, or of its network library
                if type(problem).__name__ in _NO_CREDENTIALS:
                    raise CheckpointError(
                        f"{address}: {_words(problem)}; set credentials in the environment"
                    ) from problem
                local = getattr(problem, "errno", None) in _FINAL or isinstance(problem, ValueError | TypeError)
                if local or time.monotonic() - start_time + pause > self.patience:
                    raise CheckpointError(f"{address}: {_words(problem)}") from problem
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _path_of(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    # -- objects ---------------------------------------------------------------------------------------------

    def top(self) -> set[str]:
        """Returns the names of files and folders in the store's folder; empty if it does not exist yet."""

        def no_folder() -> set[str]:
            bucket = self._root.strip("/").split("/")[0]
            if not self._root.startswith("/") and not self._call("", lambda: self._fs.exists(bucket)):
                raise CheckpointError(f"{self.url}: bucket {bucket} does not exist; create it, or correct the name")
            return set()

        paths = self._call("", lambda: {e["name"].rstrip("/") for e in self._fs.ls(self._root, detail=True)}, no_folder)
        return {name.rpartition("/")[2] for name in paths if name != self._root.rstrip("/")}

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Returns the size in bytes of every file under `folder`, by path inside it."""
        root = self._path_of(folder).rstrip("/") + "/"
        entries = self._call(folder, lambda: self._fs.find(root, detail=True), dict)
        files = {name: entry for name, entry in entries.items() if entry["type"] == "file"}
        return {name.removeprefix(root): int(entry["size"]) for name, entry in files.items()}

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small file; None if there is no such file."""
        return self._call(name, lambda: self._fs.cat_file(self._path_of(name)), lambda: None)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file; readers see the old or the new content, never a part."""
        self._call(name, lambda: self._fs.pipe_file(self._path_of(name), data))

    def upload(self, file: Path, name: str) -> None:
        """Upload a local file. name: its path in the store's folder."""
        self._call(name, lambda: self._fs.put_file(str(file), self._path_of(name)))

    def download(self, name: str, file: Path) -> None:
        """Download `name` from the store to the local path `file`, which appears only when it is complete."""
        file.parent.mkdir(parents=True, exist_ok=True)
        # A unique name, because machines that share the folder download the same file.
        temporary = file.with_name(f".tmp_{file.name}.{uuid.uuid4().hex[:8]}")
        try:
            self._call(name, lambda: self._fs.get_file(self._path_of(name), str(temporary)))
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Raise CheckpointError if the store's folder cannot be written; writes and deletes a test file."""
        self.top()
        self.write(_PROBE, b"")
        self._delete(_PROBE)

    def _delete(self, name: str) -> None:
        """Delete a file, or a folder with its content."""
        self._call(name, lambda: self._fs.rm(self._path_of(name), recursive=True), lambda: None)

    # -- folders that are complete or absent -----------------------------------------------------------------

    def finished_names(self) -> set[str]:
        """Returns the names of files and folders in the store whose upload is complete (no mark)."""
        names = self.top()
        return {name for name in names if not name.startswith(".") and _MARK + name not in names}

    def remove(self, folder: str) -> None:
        """Delete a folder in the store. It is first marked as unfinished, in case deleting is interrupted."""
        self.write(_MARK + folder, b"")
        self._delete(folder)
        self._delete(_MARK + folder)

    def begin(self, folder: str, *, sole_writer: bool = True) -> None:
        """Mark `folder` as unfinished before its files are sent, and delete an earlier folder of this name.

        If `latest` names the earlier folder, `latest` is first set to another checkpoint. sole_writer: nobody
        else writes to this store, so leftovers of interrupted saves are deleted too."""
        existing = self.top()
        for name in sorted(name.removeprefix(_MARK) for name in existing if name.startswith(_MARK)):
            if sole_writer or name == folder:
                self.remove(name)
                existing.discard(name)
        if folder in existing:
            if (self.read(LATEST) or b"").decode().strip() == folder:
                other_names = (name for name in self.finished_names() if is_tag(name) and name != folder)
                other_tags = sorted(other_names, key=step_of)
                earlier_tags = [name for name in other_tags if step_of(name) < step_of(folder)] or other_tags
                self.write(LATEST, earlier_tags[-1].encode()) if earlier_tags else self._delete(LATEST)
            self.remove(folder)
        self.write(_MARK + folder, b"")

    def finish(self, folder: str) -> None:
        """Remove the mark of a folder whose files were all sent; the folder then counts as complete."""
        self._delete(_MARK + folder)

    def send_folder(self, local: Path, name: str) -> None:
        """Upload folder `local` as folder `name` of the store; manifest.json or config.json comes last."""
        self.begin(name, sole_writer=False)
        files = sorted(str(file.relative_to(local)) for file in local.rglob("*") if file.is_file())
        self.send(local, name, files, last=(MANIFEST, HF_CONFIG))
        self.finish(name)

    def send(self, local: Path, folder: str, names: Iterable[str], last: Collection[str] = ()) -> None:
        """Upload files of a local folder to `folder` of the store.

        names: paths of the files inside the local folder. last: those to upload after all others."""
        names = list(names)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            early_names = [name for name in names if name not in last]
            list(threads.map(lambda name: self.upload(local / name, f"{folder}/{name}"), early_names))
        for name in names:
            if name in last:
                self.upload(local / name, f"{folder}/{name}")


def mirror_manifests(store: ObjectStore, folder: Path) -> None:
    """Copy `latest` and the manifest of each complete checkpoint from the store to the local `folder`.

    Local checkpoints that the store lacks are deleted. Files that were fetched earlier stay, unless the
    checkpoint's manifest has changed. If the store holds a HuggingFace model instead, it is fetched in full.
    """
    names = store.finished_names()
    folder.mkdir(parents=True, exist_ok=True)
    tags = sorted((name for name in names if is_tag(name)), key=step_of)
    for local_folder in folder.iterdir():
        if local_folder.is_dir() and is_tag(local_folder.name) and local_folder.name not in tags:
            shutil.rmtree(local_folder)

    def mirror(tag: str) -> None:
        path, data = folder / tag, store.read(f"{tag}/{MANIFEST}")
        file = path / MANIFEST
        if data is None or not file.is_file() or file.read_bytes() != data:
            shutil.rmtree(path, ignore_errors=True)
        path.mkdir(exist_ok=True)
        if data is None:  # a checkpoint of GPT-NeoX; its first mp_rank file describes the model
            if model_file(0) in store.sizes(tag):
                store.download(f"{tag}/{model_file(0)}", path / model_file(0))
            return
        replace_file(file, data)
        try:
            manifest = Manifest.from_json(data.decode(errors="replace"), f"{store.url}/{tag}/{MANIFEST}")
        except CheckpointError:
            return  # raised again when it is read
        if EPHEMERAL in manifest.files:
            (path / EPHEMERAL).touch()
        created = datetime.fromisoformat(manifest.created).timestamp()
        os.utime(path, (created, created))  # because retention goes by the age of a checkpoint

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(mirror, tags))
    latest = store.read(LATEST)
    if latest is not None:
        replace_file(folder / LATEST, latest)
    else:
        (folder / LATEST).unlink(missing_ok=True)
        if HF_CONFIG in names:
            fetch_checkpoint(store, "", folder)


def fetch_checkpoint(
    store: ObjectStore, tag: str, path: Path, is_selected: Callable[[str], bool] = lambda name: True
) -> None:
    """Download the files of checkpoint `tag` that `path` lacks, and check them against its manifest, if any.

    tag: name in the store; "" for the store's folder itself. is_selected: takes a file name; tells whether to
        download the file. Raises DamagedError that names every file that differs from the manifest, and
        CheckpointError if the disk has too little free space."""
    address = f"{store.url}/{tag}".rstrip("/")
    if tag and tag not in store.finished_names():
        raise CheckpointError(f"{address}: does not exist, or its upload was not finished; load another `iteration`")
    remote_sizes = {name: size for name, size in store.sizes(tag).items() if is_selected(name)}
    if not remote_sizes:
        raise CheckpointError(f"{address}: no checkpoint files found (empty folder, or wrong path)")
    path.mkdir(parents=True, exist_ok=True)
    if MANIFEST in remote_sizes:
        store.download(f"{tag}/{MANIFEST}".lstrip("/"), path / MANIFEST)
    manifest = read_manifest(path)
    records = manifest.files if manifest is not None else {}
    files = {name: record for name, record in records.items() if is_selected(name)}
    local_sizes = file_sizes(path, remote_sizes)
    missing = [name for name, size in remote_sizes.items() if local_sizes.get(name) != size]
    missing_bytes, free = sum(remote_sizes[name] for name in missing), shutil.disk_usage(path).free
    if free < missing_bytes:
        raise CheckpointError(
            f"{path}: {address} takes {readable_size(missing_bytes)}, but only {readable_size(free)} are free; make "
            "room, or name another folder (remote_staging; TMPDIR for tools)"
        )

    def bring(name: str) -> str | None:
        record = files.get(name)
        for _ in range(2):  # a second download repairs an error of the network
            store.download(f"{tag}/{name}".lstrip("/"), path / name)
            if record is None or sha256(path / name) == record.sha256:
                return None
        assert record is not None
        size = (path / name).stat().st_size
        return f"{name} ({f'{size:,} bytes instead of {record.size:,}' if size != record.size else 'checksum'})"

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        bad = [text for text in threads.map(bring, missing) if text is not None]
    bad += [f"{name} (missing)" for name in files if name not in remote_sizes]
    if bad:
        raise DamagedError(f"{address}: damaged: {', '.join(sorted(bad))}; load another `iteration`")


def keep_manifest_only(path: Path) -> None:
    """Delete a downloaded checkpoint's files except manifest.json and the mark of an ephemeral checkpoint."""
    manifest = read_manifest(path)
    for file in sorted(path.rglob("*"), reverse=True) if manifest is not None else ():
        if file.is_dir():
            file.rmdir() if not any(file.iterdir()) else None
        elif file.name not in (MANIFEST, EPHEMERAL):
            file.unlink()


def _words(problem: BaseException) -> str:
    """Returns the first line of an exception's text, or the name of its class if it has no text."""
    lines = str(problem).strip().splitlines()
    return lines[0][:300] if lines else type(problem).__name__
