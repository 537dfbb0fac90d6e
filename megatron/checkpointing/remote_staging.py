"""Mirrors remote folders in local folders (`remote_staging`).

A run's remote `save` and `load` have local folders, which are filled before ranks are connected. Every rank
calls `mirror_remote_checkpoints` and `fetch_staged_checkpoint`; the first rank of a machine does the work and
the others wait. Command-line tools use `local_copy` and `upload_on_exit`.
"""

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.layout import LATEST, find_checkpoint, is_tag, list_checkpoints, step_of
from megatron.checkpointing.object_store import (
    HF_CONFIG,
    ObjectStore,
    fetch_checkpoint,
    keep_manifest_only,
    mirror_manifests,
)
from megatron.checkpointing.tensor_files import open_lock_file
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.remote_paths import is_remote, remote_path_error


def remote_folders(args: NeoXArgs) -> dict[str, Path]:
    """Returns {address: local folder that mirrors it} for `save` and `load`, if they are remote."""
    places = ((args.save, args.save_dir), (args.load, args.load_dir))
    return {url: Path(folder) for url, folder in places if url and folder and is_remote(url)}


def object_store_of(args: NeoXArgs) -> ObjectStore | None:
    """Returns the object store that `save` names; None if `save` is local or not set."""
    return ObjectStore(args.save, args.remote_patience) if args.save is not None and is_remote(args.save) else None


def mirror_remote_checkpoints(args: NeoXArgs, *, writes: bool) -> None:
    """Copy names and manifests of the checkpoints in remote `save` and `load` to their local folders.

    writes: the run will save checkpoints, so check now that it can write to `save`. Raises CheckpointError.
    """
    start_time = time.time()
    for url, folder in remote_folders(args).items():
        with _locked(folder) as stamp:
            if stamp.stat().st_size and stamp.stat().st_mtime >= start_time:
                continue  # another rank has just done this
            store = ObjectStore(url, args.remote_patience)
            if writes and url == args.save:
                store.check_writable()
            mirror_manifests(store, folder)
            stamp.write_text(url)


def fetch_staged_checkpoint(args: NeoXArgs, path: Path) -> None:
    """Download all files of a remote checkpoint to the local directory `path`, which holds its manifest.

    Does nothing for a local checkpoint. Raises CheckpointError, DamagedError."""
    for url, folder in remote_folders(args).items():
        if path.parent == folder:
            with _locked(folder):
                for checkpoint in list_checkpoints(folder) if url == args.save else ():
                    if checkpoint != path:
                        keep_manifest_only(checkpoint)  # downloaded by an earlier start
                fetch_checkpoint(ObjectStore(url, args.remote_patience), path.name, path)


def with_local_model(args: NeoXArgs) -> NeoXArgs:
    """Downloads the model that a remote `load` (else `save`) names, for a command that only reads it.

    Returns `args` with local folders as `load` and `save`. Raises CheckpointError."""
    folders = remote_folders(args)
    if not folders:
        return args
    mirror_remote_checkpoints(args, writes=False)
    source = Path(args.load_dir or args.save_dir or "")
    if source in folders.values() and not (source / HF_CONFIG).is_file():
        fetch_staged_checkpoint(args, find_checkpoint(source, args.iteration))
    return args.replace(save=args.save_dir, load=args.load_dir)


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Within the context, no other process of this machine has the lock of `folder`; yields the lock file."""
    file = folder.parent / f".{folder.name}.stamp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = open_lock_file(file)
    except OSError as problem:
        raise CheckpointError(
            f"{folder}: cannot be written ({problem.strerror}); set remote_staging to another folder"
        ) from problem
    with opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield file


def remote_checkpoints(url: str) -> list[str]:
    """Returns addresses of complete checkpoints in remote folder `url`, by step; [url] if there are none."""
    store = _tool_store(url)
    tags = sorted((name for name in store.finished_names() if is_tag(name)), key=step_of)
    return [f"{store.url}/{tag}" for tag in tags] or [store.url]


@contextmanager
def local_copy(place: str | Path, iteration: int | None = None) -> Iterator[Path]:
    """Yields a local folder with the content of `place`: `place` itself if it is local, else a download.

    If `place` is a remote folder of checkpoints, only one checkpoint is downloaded in full: that of
    `iteration` (None: the one that `latest` names). For the others only manifests are downloaded. Raises
    CheckpointError."""
    if not is_remote(str(place)):
        yield Path(place)
        return
    store = _tool_store(str(place))
    with tempfile.TemporaryDirectory(prefix="neox-") as spare:
        parent, _, name = store.url.rpartition("/")
        folder = Path(spare) / name
        if any(is_tag(entry) for entry in store.finished_names()):
            mirror_manifests(store, folder)
            path = find_checkpoint(folder, iteration)
            fetch_checkpoint(store, path.name, path)
        elif parent.endswith(":/"):
            fetch_checkpoint(store, "", folder)
        else:
            fetch_checkpoint(ObjectStore(parent), name, folder)
        yield folder


@contextmanager
def upload_on_exit(place: str | Path) -> Iterator[Path]:
    """Yields a local folder to write to: `place` itself if local, else a folder that is uploaded at the end.

    Checkpoints that exist at a remote `place` appear in the folder as empty folders. After an exception
    nothing is uploaded. Raises CheckpointError."""
    if not is_remote(str(place)):
        yield Path(place)
        return
    store = _tool_store(str(place))
    store.check_writable()
    parent, _, name = store.url.rpartition("/")
    remote_names = store.finished_names()
    tags = {remote_name for remote_name in remote_names if is_tag(remote_name)}
    with tempfile.TemporaryDirectory(prefix="neox-") as spare:
        folder = Path(spare) / name
        for tag in tags:
            (folder / tag).mkdir(parents=True)
        yield folder
        new_entries = [entry for entry in sorted(folder.iterdir()) if entry.name not in tags and entry.name[0] != "."]
        if not any(is_tag(entry.name) for entry in new_entries):
            if remote_names or parent.endswith(":/"):
                raise CheckpointError(f"{place}: already exists; remove it, or choose another folder")
            ObjectStore(parent).send_folder(folder, name)
            return
        for entry in sorted(new_entries, key=lambda entry: entry.name == LATEST):
            if entry.is_dir():
                store.send_folder(entry, entry.name)
            else:
                store.upload(entry, entry.name)


def _tool_store(url: str) -> ObjectStore:
    wrong = remote_path_error(url)
    if wrong is not None:
        raise CheckpointError(wrong)
    return ObjectStore(url)
