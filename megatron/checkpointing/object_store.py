"""Checkpoints in an object store (s3://, gs://, ...), reached through fsspec; no other file talks to it.

A store has no rename. A checkpoint there is whole when its folder exists and no mark `.unfinished_<its name>`
beside it. The mark is made before the first file is sent and removed after the last, the manifest; then
`latest` is written.
Marked folders are ignored, and removed by the next save; deleting a checkpoint begins with the mark too.

Credentials are fsspec's matter: the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...) and its usual
files.
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
_AT_ONCE = 8  # transfers of small files; a large one is sent in parts side by side by fsspec itself
_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
# Another attempt finds the same: of this machine's disk, or of what was asked for.
_FINAL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTDIR}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "NoAuthHandlerFound"}


class ObjectStore:
    """One folder in an object store.

    patience: seconds for which calls are repeated when the store does not answer.

    Every method raises CheckpointError, which names the address.
    """

    def __init__(self, url: str, patience: float = 0.0) -> None:
        self.url, self.patience = url.rstrip("/"), patience
        scheme = url.partition("://")[0]
        filesystem_options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            from fsspec.core import url_to_fs

            # Nothing is remembered: other machines write there too.
            self._fs, self._root = url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True, **filesystem_options
            )
        except ImportError as problem:
            package = "'neox[remote]'" if scheme in ("s3", "s3a") else "the package that fsspec names"
            raise CheckpointError(f"{url}: {problem}; pip install {package}") from problem
        except Exception as problem:  # each protocol has its own
            raise CheckpointError(f"{url}: {_words(problem)}") from problem

    def _call(self, name: str, work: Callable[[], T], missing: Callable[[], T] | None = None) -> T:
        begun, pause = time.monotonic(), _PAUSE
        where = f"{self.url}/{name}" if name else self.url
        while True:
            try:
                return work()
            except FileNotFoundError as problem:
                if missing is not None:
                    return missing()
                raise CheckpointError(f"{where}: is not there ({_words(problem)})") from problem
            except PermissionError as problem:
                raise CheckpointError(
                    f"{where}: no permission ({_words(problem)}); check the credentials in the environment"
                ) from problem
            except Exception as problem:  # of the store's own library, or its network's
                if type(problem).__name__ in _NO_CREDENTIALS:
                    raise CheckpointError(f"{where}: {_words(problem)}; set them in the environment") from problem
                local = getattr(problem, "errno", None) in _FINAL or isinstance(problem, ValueError | TypeError)
                if local or time.monotonic() - begun + pause > self.patience:
                    raise CheckpointError(f"{where}: {_words(problem)}") from problem
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    # -- objects ---------------------------------------------------------------------------------------------

    def top(self) -> set[str]:
        """The names of files and folders in it; empty for a folder that nothing was written to yet."""

        def nothing() -> set[str]:
            bucket = self._root.strip("/").split("/")[0]
            if not self._root.startswith("/") and not self._call("", lambda: self._fs.exists(bucket)):
                raise CheckpointError(f"{self.url}: there is no bucket {bucket}; make it, or correct the name")
            return set()

        paths = self._call("", lambda: {e["name"].rstrip("/") for e in self._fs.ls(self._root, detail=True)}, nothing)
        return {name.rpartition("/")[2] for name in paths if name != self._root.rstrip("/")}

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The size in bytes of every file under `folder`, by path inside it."""
        root = self._at(folder).rstrip("/") + "/"
        entries = self._call(folder, lambda: self._fs.find(root, detail=True), dict)
        files = {name: entry for name, entry in entries.items() if entry["type"] == "file"}
        return {name.removeprefix(root): int(entry["size"]) for name, entry in files.items()}

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None where there is no such file."""
        return self._call(name, lambda: self._fs.cat_file(self._at(name)), lambda: None)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file; readers see the old or the new content, never a part."""
        self._call(name, lambda: self._fs.pipe_file(self._at(name), data))

    def upload(self, file: Path, name: str) -> None:
        """Upload a local file as `name`."""
        self._call(name, lambda: self._fs.put_file(str(file), self._at(name)))

    def download(self, name: str, file: Path) -> None:
        """Download `name` to a local file, which appears whole."""
        file.parent.mkdir(parents=True, exist_ok=True)
        # Of its own: where machines share the folder, each brings the same.
        temporary = file.with_name(f".tmp_{file.name}.{uuid.uuid4().hex[:8]}")
        try:
            self._call(name, lambda: self._fs.get_file(self._at(name), str(temporary)))
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Raise CheckpointError now for whatever would make the first save fail."""
        self.top()
        self.write(_PROBE, b"")
        self._delete(_PROBE)

    def _delete(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it."""
        self._call(name, lambda: self._fs.rm(self._at(name), recursive=True), lambda: None)

    # -- folders that are there whole or not at all ----------------------------------------------------------

    def whole(self) -> set[str]:
        """The names of the finished files and folders."""
        names = self.top()
        return {name for name in names if not name.startswith(".") and _MARK + name not in names}

    def remove(self, folder: str) -> None:
        """Delete a folder; it is marked first, so that half of one is never taken for a whole one."""
        self.write(_MARK + folder, b"")
        self._delete(folder)
        self._delete(_MARK + folder)

    def begin(self, folder: str, *, alone: bool = True) -> None:
        """Mark a folder that is about to be filled as unfinished.

        An earlier folder of the same name is removed, after `latest` names another one, and so are the
        leftovers of interrupted saves. alone: nobody else writes to this store.
        """
        existing = self.top()
        for name in sorted(name.removeprefix(_MARK) for name in existing if name.startswith(_MARK)):
            if alone or name == folder:
                self.remove(name)
                existing.discard(name)
        if folder in existing:
            if (self.read(LATEST) or b"").decode().strip() == folder:
                others = sorted((name for name in self.whole() if is_tag(name) and name != folder), key=step_of)
                before = [name for name in others if step_of(name) < step_of(folder)] or others
                self.write(LATEST, before[-1].encode()) if before else self._delete(LATEST)
            self.remove(folder)
        self.write(_MARK + folder, b"")

    def finish(self, folder: str) -> None:
        """Remove the mark of a folder whose files have all been sent: from now on it counts as whole."""
        self._delete(_MARK + folder)

    def send_folder(self, local: Path, name: str) -> None:
        """Upload a local folder as `name`; the file that makes it a checkpoint or a model is sent last."""
        self.begin(name, alone=False)
        files = sorted(str(file.relative_to(local)) for file in local.rglob("*") if file.is_file())
        self.send(local, name, files, last=(MANIFEST, HF_CONFIG))
        self.finish(name)

    def send(self, local: Path, folder: str, names: Iterable[str], last: Collection[str] = ()) -> None:
        """Upload the files `names` of a local folder, those in `last` after all others."""
        names = list(names)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            first = [name for name in names if name not in last]
            list(threads.map(lambda name: self.upload(local / name, f"{folder}/{name}"), first))
        for name in names:
            if name in last:
                self.upload(local / name, f"{folder}/{name}")


def mirror_manifests(store: ObjectStore, folder: Path) -> None:
    """Make `folder` look like the store: every whole checkpoint with its manifest alone, and `latest`.

    Files of a checkpoint that were fetched before stay if its manifest is the same. A HuggingFace model is
    fetched whole.
    """
    names = store.whole()
    folder.mkdir(parents=True, exist_ok=True)
    tags = sorted((name for name in names if is_tag(name)), key=step_of)
    for local_folder in folder.iterdir():
        if local_folder.is_dir() and is_tag(local_folder.name) and local_folder.name not in tags:
            shutil.rmtree(local_folder)

    def one(tag: str) -> None:
        path, data = folder / tag, store.read(f"{tag}/{MANIFEST}")
        file = path / MANIFEST
        if data is None or not file.is_file() or file.read_bytes() != data:
            shutil.rmtree(path, ignore_errors=True)
        path.mkdir(exist_ok=True)
        if data is None:  # GPT-NeoX's; what it says of its model is in its first file
            if model_file(0) in store.sizes(tag):
                store.download(f"{tag}/{model_file(0)}", path / model_file(0))
            return
        replace_file(file, data)
        try:
            manifest = Manifest.from_json(data.decode(errors="replace"), f"{store.url}/{tag}/{MANIFEST}")
        except CheckpointError:
            return  # told to whoever reads it
        if EPHEMERAL in manifest.files:
            (path / EPHEMERAL).touch()
        created = datetime.fromisoformat(manifest.created).timestamp()
        os.utime(path, (created, created))  # retention goes by the age of a checkpoint

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(one, tags))
    latest = store.read(LATEST)
    if latest is not None:
        replace_file(folder / LATEST, latest)
    else:
        (folder / LATEST).unlink(missing_ok=True)
        if HF_CONFIG in names:
            fetch_checkpoint(store, "", folder)


def fetch_checkpoint(
    store: ObjectStore, tag: str, path: Path, wanted: Callable[[str], bool] = lambda name: True
) -> None:
    """Download the files of the checkpoint `tag` to `path`, except those that are there in full, and check
    each against the manifest, if there is one.

    tag: "" for the folder of the store itself. wanted: whether a file of this name is to be downloaded.
    Raises DamagedError that names every file which is not what the manifest says, CheckpointError for no
    space.
    """
    where = f"{store.url}/{tag}".rstrip("/")
    if tag and tag not in store.whole():
        raise CheckpointError(f"{where}: is not there, or was not finished; load another `iteration`")
    remote_sizes = {name: size for name, size in store.sizes(tag).items() if wanted(name)}
    if not remote_sizes:
        raise CheckpointError(f"{where}: there is nothing")
    path.mkdir(parents=True, exist_ok=True)
    if MANIFEST in remote_sizes:
        store.download(f"{tag}/{MANIFEST}".lstrip("/"), path / MANIFEST)
    manifest = read_manifest(path)
    files = {name: record for name, record in manifest.files.items() if wanted(name)} if manifest is not None else {}
    here = file_sizes(path, remote_sizes)
    missing = [name for name, size in remote_sizes.items() if here.get(name) != size]
    needed, free = sum(remote_sizes[name] for name in missing), shutil.disk_usage(path).free
    if free < needed:
        raise CheckpointError(
            f"{path}: {where} takes {readable_size(needed)}, {readable_size(free)} are free; make room, or name "
            "another folder (remote_staging; TMPDIR for tools)"
        )

    def bring(name: str) -> str | None:
        record = files.get(name)
        for _ in range(2):  # what came wrong over the network comes right the second time
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
        raise DamagedError(f"{where}: damaged: {', '.join(sorted(bad))}; load another `iteration`")


def keep_manifest_only(path: Path) -> None:
    """Delete all files of a fetched checkpoint but those that `mirror_manifests` makes."""
    manifest = read_manifest(path)
    for file in sorted(path.rglob("*"), reverse=True) if manifest is not None else ():
        if file.is_dir():
            file.rmdir() if not any(file.iterdir()) else None
        elif file.name not in (MANIFEST, EPHEMERAL):
            file.unlink()


def _words(problem: BaseException) -> str:
    """The first line of an exception's text, or the name of its class where it has none."""
    lines = str(problem).strip().splitlines()
    return lines[0][:300] if lines else type(problem).__name__
