"""Publishes complete checkpoints: written under a temporary name, synced, renamed; `latest` is set last.

Rank 0 calls `begin_checkpoint` and, when all ranks have written, `publish`. A crash at any point leaves the
earlier checkpoints and `latest` as they were. Names of unfinished folders begin with a dot, and the next
`begin_checkpoint` removes them.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePath

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.layout import LATEST, backup_tag, step_tag
from megatron.checkpointing.manifest import MANIFEST, Manifest, file_sizes, size_problems
from megatron.checkpointing.object_store import ObjectStore
from megatron.checkpointing.retention import Retention, checkpoints_to_delete
from megatron.checkpointing.tensor_files import FileRecord, need_free, replace_file, write_bytes
from megatron.data.files import sync
from megatron.process import say


def begin_checkpoint(save: str | Path, iteration: int) -> Path:
    """Creates and returns an empty temporary folder in `save`; removes leftovers of interrupted saves."""
    save = Path(save)
    save.mkdir(parents=True, exist_ok=True)
    for leftover in save.glob(".tmp_*"):
        with suppress(OSError):  # a leftover is harmless; if it has the name created below, mkdir fails
            _delete(leftover)
    for backup in save.glob(backup_tag("*")):
        _restore_backup(backup)
    temporary = save / f".tmp_{step_tag(iteration)}"
    temporary.mkdir()
    return temporary


@contextmanager
def new_checkpoint(
    save: Path, iteration: int, size: int, check_free: Callable[[Path, int], None] = need_free
) -> Iterator[Path]:
    """Yields a temporary folder to fill with a checkpoint; call `publish` within the context.

    size: bytes to be written. check_free: called with (folder, size); raises CheckpointError if there is no
        space. At the end, a temporary folder that was not published is removed. Folders created here (`save`,
        its parents) are removed if they are empty. Raises CheckpointError if the folder cannot be written."""
    created = [folder for folder in (save, *save.parents) if not folder.exists()]
    temporary = None
    try:
        save.mkdir(parents=True, exist_ok=True)
        check_free(save, size)
        temporary = begin_checkpoint(save, iteration)
        yield temporary
    except OSError as problem:
        raise CheckpointError(f"{save}: cannot be written ({problem.strerror or problem})") from problem
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # not empty
            for folder in created:
                folder.rmdir()


def _restore_backup(backup: Path) -> None:
    """Rename the backup of a replaced checkpoint to its original name; delete it if that name exists."""
    final = backup.with_name(backup.name.removeprefix(backup_tag("")))
    if final.exists():
        with suppress(OSError):
            _remove(backup)
    else:
        os.rename(backup, final)


def _remove(path: Path) -> None:
    """Delete a checkpoint directory. It is first renamed, in case deleting is interrupted."""
    doomed = path.with_name(f".tmp_removed_{path.name}")
    os.rename(path, doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    """Delete a file, a folder with its content, or a link but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_configs(temporary: Path, configs: Mapping[str, str], files: dict[str, FileRecord]) -> None:
    """Write configuration files to `configs/` in `temporary`, and add their records to `files`.

    configs: text of each file, by its path."""
    (temporary / "configs").mkdir(exist_ok=True)
    for path, text in configs.items():
        name, file = f"configs/{PurePath(path).name}", PurePath(path)
        for number in range(2, len(configs) + 1):  # files with equal names from two folders are both kept
            if name in files:
                name = f"configs/{file.stem}_{number}{file.suffix}"
        files[name] = write_bytes(text.encode(), temporary / name, name)


def publish(
    temporary: Path,
    save: str | Path,
    iteration: int,
    manifest: Manifest,
    configs: Mapping[str, str],
    keep: Retention = Retention(),  # noqa: B008 (frozen)
    store: ObjectStore | None = None,
    say: Callable[[str], None] = say,
) -> Path:
    """Completes a checkpoint: renames `temporary` to `<save>/global_stepN`, and sets `latest` to it.

    temporary: the directory that the ranks have filled, from `begin_checkpoint`.
    iteration: N.
    manifest: its `files` has the records of all files that the ranks wrote.
    configs: text of each configuration file, by its path.
    keep: which older checkpoints to keep; others are deleted.
    store: the object store that the ranks sent their files to; `save` then only holds its manifests.
    say: called with a line of text for each older checkpoint that could not be deleted.
    Returns the checkpoint's directory. Raises CheckpointError if a recorded file is missing or incomplete."""
    save, temporary = Path(save), Path(temporary)
    files = dict(manifest.files)
    _write_configs(temporary, configs, files)
    tag, added = step_tag(iteration), [name for name in files if name not in manifest.files]
    if store is not None:
        store.send(temporary, tag, added)
    bad = size_problems(file_sizes(temporary, files) if store is None else store.sizes(tag), files.values())
    if bad:
        raise CheckpointError(f"{temporary}: not published, because these files are incomplete: {', '.join(bad)}")
    for directory in {(temporary / name).parent for name in (files if store is None else added)}:
        sync(directory)
    replace_file(temporary / MANIFEST, replace(manifest, iteration=iteration, files=files).to_json().encode())
    if store is not None:
        store.send(temporary, tag, [MANIFEST])
        store.finish(tag)
        store.write(LATEST, tag.encode())

    final, backup = save / tag, save / backup_tag(tag)
    if final.exists():
        os.rename(final, backup)
    os.rename(temporary, final)
    sync(save)
    replace_file(save / LATEST, final.name.encode())
    if backup.is_symlink() or backup.exists():
        _forget(backup, None, say)
    try:
        old = checkpoints_to_delete(save, final, keep)
    except (OSError, CheckpointError) as problem:  # a manifest of an older checkpoint may be unreadable
        say(f"{problem}; no older checkpoint was deleted")
        return final
    for earlier in old:
        if earlier.is_symlink():
            say(f"{earlier}: is a link and stays: keep_last_n_checkpoints deletes only what {save} itself holds")
        else:
            _forget(earlier, store, say)
    return final


def _forget(path: Path, store: ObjectStore | None, say: Callable[[str], None]) -> None:
    """Delete an older checkpoint on disk and in the store; if that fails, call `say` with a line of text."""
    try:
        if store is not None:
            store.remove(path.name)
        _remove(path)
    except (OSError, CheckpointError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        say(f"{path}: the older checkpoint could not be deleted ({reason}); delete it by hand")
