"""Local folders that stand for remote ones (`remote_staging`).

A local folder stands for a run's `save` and for its `load`, filled before ranks are connected: every rank
calls `mirror_remote_checkpoints` and `fetch_staged_checkpoint`; the first rank of a machine does the work,
the others wait and find it done. Command-line tools have `local_copy` and `upload_on_exit`.
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
    """The addresses of remote `save` and `load`, each with the local folder that stands for it."""
    places = ((args.save, args.save_dir), (args.load, args.load_dir))
    return {url: Path(folder) for url, folder in places if url and folder and is_remote(url)}


def object_store_of(args: NeoXArgs) -> ObjectStore | None:
    """The object store that checkpoints are sent to; None for a local `save`."""
    return ObjectStore(args.save, args.remote_patience) if args.save is not None and is_remote(args.save) else None


def mirror_remote_checkpoints(args: NeoXArgs, *, writes: bool) -> None:
    """Copy the names and manifests of remote checkpoints to this machine.

    writes: the run saves checkpoints, so check that it can.

    Raises CheckpointError.
    """
    begun = time.time()
    for url, folder in remote_folders(args).items():
        with _alone(folder) as stamp:
            if stamp.stat().st_size and stamp.stat().st_mtime >= begun:
                continue  # another rank did, since this one came here
            store = ObjectStore(url, args.remote_patience)
            if writes and url == args.save:
                store.check_writable()
            mirror_manifests(store, folder)
            stamp.write_text(url)


def fetch_staged_checkpoint(args: NeoXArgs, path: Path) -> None:
    """Download the whole checkpoint that the local directory `path` stands for; nothing if it is no remote
    one.

    Raises CheckpointError, DamagedError.
    """
    for url, folder in remote_folders(args).items():
        if path.parent == folder:
            with _alone(folder):
                for other in list_checkpoints(folder) if url == args.save else ():
                    if other != path:
                        keep_manifest_only(other)  # of an earlier start
                fetch_checkpoint(ObjectStore(url, args.remote_patience), path.name, path)


def with_local_model(args: NeoXArgs) -> NeoXArgs:
    """The configuration for a command that only reads a model: with local folders as `load` and `save`.

    The checkpoint or HuggingFace model that a remote `load` (else `save`) names is downloaded. Raises
    CheckpointError.
    """
    folders = remote_folders(args)
    if not folders:
        return args
    mirror_remote_checkpoints(args, writes=False)
    source = Path(args.load_dir or args.save_dir or "")
    if source in folders.values() and not (source / HF_CONFIG).is_file():
        fetch_staged_checkpoint(args, find_checkpoint(source, args.iteration))
    return args.replace(save=args.save_dir, load=args.load_dir)


@contextmanager
def _alone(folder: Path) -> Iterator[Path]:
    """Within the context no other process of this machine is in it; gives the locked file."""
    file = folder.parent / f".{folder.name}.stamp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = open_lock_file(file)
    except OSError as problem:
        raise CheckpointError(f"{folder}: cannot be written ({problem.strerror}); set remote_staging") from problem
    with opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield file


def remote_checkpoints(url: str) -> list[str]:
    """The addresses of the whole checkpoints in a remote folder, by step; its own address if there are
    none."""
    store = _tool_store(url)
    tags = sorted((name for name in store.whole() if is_tag(name)), key=step_of)
    return [f"{store.url}/{tag}" for tag in tags] or [store.url]


@contextmanager
def local_copy(place: str | Path, iteration: int | None = None) -> Iterator[Path]:
    """Within the context a local folder with the content of `place`, which is itself where it is local.

    From a remote folder of checkpoints the one of `iteration` (None: that which `latest` names) is downloaded
    whole, and the manifests of the others; any other remote folder is downloaded whole. Raises
    CheckpointError.
    """
    if not is_remote(str(place)):
        yield Path(place)
        return
    store = _tool_store(str(place))
    with tempfile.TemporaryDirectory(prefix="neox-") as spare:
        parent, _, name = store.url.rpartition("/")
        folder = Path(spare) / name
        if any(is_tag(entry) for entry in store.whole()):
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
    """Within the context a local folder to write to, which is uploaded to a remote `place` when no exception
    came.

    Checkpoints that are there already are seen in it as empty folders. Raises CheckpointError.
    """
    if not is_remote(str(place)):
        yield Path(place)
        return
    store = _tool_store(str(place))
    store.check_writable()
    parent, _, name = store.url.rpartition("/")
    remote_names = store.whole()
    tags = {remote_name for remote_name in remote_names if is_tag(remote_name)}
    with tempfile.TemporaryDirectory(prefix="neox-") as spare:
        folder = Path(spare) / name
        for tag in tags:
            (folder / tag).mkdir(parents=True)
        yield folder
        made = [entry for entry in sorted(folder.iterdir()) if entry.name not in tags and entry.name[0] != "."]
        if not any(is_tag(entry.name) for entry in made):
            if remote_names or parent.endswith(":/"):
                raise CheckpointError(f"{place}: is there already; remove it, or give another folder")
            ObjectStore(parent).send_folder(folder, name)
            return
        for entry in sorted(made, key=lambda entry: entry.name == LATEST):
            if entry.is_dir():
                store.send_folder(entry, entry.name)
            else:
                store.upload(entry, entry.name)


def _tool_store(url: str) -> ObjectStore:
    wrong = remote_path_error(url)
    if wrong is not None:
        raise CheckpointError(wrong)
    return ObjectStore(url)
