"""A checkpoint appears whole or not at all: written under a temporary name, synced, renamed, `latest` last.

Rank 0 calls `begin_checkpoint` and, when all ranks have written, `publish`. A crash at any point leaves the
earlier checkpoints and `latest` as they were; names of unfinished folders begin with a dot, and the next
`begin_checkpoint` removes them.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePath

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.layout import LATEST, aside_tag, step_tag
from megatron.checkpointing.manifest import MANIFEST, Manifest, file_sizes, size_problems
from megatron.checkpointing.object_store import ObjectStore
from megatron.checkpointing.retention import Retention, checkpoints_to_delete
from megatron.checkpointing.tensor_files import FileRecord, need_free, replace_file, write_bytes
from megatron.data.files import sync
from megatron.process import say


def begin_checkpoint(save: str | Path, iteration: int) -> Path:
    """Make an empty temporary directory for the files of `iteration` and remove leftovers of interrupted
    saves."""
    save = Path(save)
    save.mkdir(parents=True, exist_ok=True)
    for leftover in save.glob(".tmp_*"):
        with suppress(OSError):  # what cannot be removed is in nobody's way, but for the folder made below
            _delete(leftover)
    for aside in save.glob(aside_tag("*")):
        _settle(aside)
    temporary = save / f".tmp_{step_tag(iteration)}"
    temporary.mkdir()
    return temporary


@contextmanager
def new_checkpoint(
    save: Path, iteration: int, needed: int, check_free: Callable[[Path, int], None] = need_free
) -> Iterator[Path]:
    """`begin_checkpoint`, once it is known that `needed` bytes are free; within, `publish` is called.

    check_free: raises CheckpointError where they are not. Where anything fails, nothing is left: neither the
    temporary folder nor `save` and its parents, as far as they were made here. Raises CheckpointError for
    what cannot be written.
    """
    made = [folder for folder in (save, *save.parents) if not folder.exists()]
    temporary = None
    try:
        save.mkdir(parents=True, exist_ok=True)
        check_free(save, needed)
        temporary = begin_checkpoint(save, iteration)
        yield temporary
    except OSError as problem:
        raise CheckpointError(f"{save}: cannot be written ({problem.strerror or problem})") from problem
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()


def _settle(aside: Path) -> None:
    """Give a checkpoint that was set aside its name back, or delete it where its successor has that name."""
    final = aside.with_name(aside.name.removeprefix(aside_tag("")))
    if final.exists():
        with suppress(OSError):
            _remove(aside)
    else:
        os.rename(aside, final)


def _remove(path: Path) -> None:
    """Delete a checkpoint directory; it is renamed first, so that half of one is never taken for a whole
    one."""
    doomed = path.with_name(f".tmp_removed_{path.name}")
    os.rename(path, doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    """Delete a folder with all that is in it, a file, or a link, whose target stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_configs(temporary: Path, configs: Mapping[str, str], files: dict[str, FileRecord]) -> None:
    """Write each configuration file below `configs/` and add its record to `files`."""
    (temporary / "configs").mkdir(exist_ok=True)
    for path, text in configs.items():
        name, file = f"configs/{PurePath(path).name}", PurePath(path)
        for again in range(2, len(configs) + 1):  # files of one name from two folders are both kept
            if name in files:
                name = f"configs/{file.stem}_{again}{file.suffix}"
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
    """Turn the directory that `begin_checkpoint` made and the ranks filled into `<save>/global_stepN`, and
    let `latest` name it.

    manifest.files: records of all files that the ranks wrote.
    configs: the text of each configuration file by its name.
    keep: which older checkpoints are deleted, never the new one. store: the object store that the ranks have
    sent their files to; `save` then holds a copy of its manifests alone. say: receives a line for each older
    checkpoint that could not be deleted, which does not affect the new one.
    Returns the checkpoint's directory. Raises CheckpointError when a recorded file is not there in full.
    """
    save, temporary = Path(save), Path(temporary)
    files = dict(manifest.files)
    _write_configs(temporary, configs, files)
    tag, added = step_tag(iteration), [name for name in files if name not in manifest.files]
    if store is not None:
        store.send(temporary, tag, added)
    bad = size_problems(file_sizes(temporary, files) if store is None else store.sizes(tag), files.values())
    if bad:
        raise CheckpointError(f"{temporary}: not published, its files are not whole: {', '.join(bad)}")
    for directory in {(temporary / name).parent for name in (files if store is None else added)}:
        sync(directory)
    replace_file(temporary / MANIFEST, replace(manifest, iteration=iteration, files=files).to_json().encode())
    if store is not None:
        store.send(temporary, tag, [MANIFEST])
        store.finish(tag)
        store.write(LATEST, tag.encode())

    final, aside = save / tag, save / aside_tag(tag)
    if final.exists():
        os.rename(final, aside)
    os.rename(temporary, final)
    sync(save)
    replace_file(save / LATEST, final.name.encode())
    if aside.is_symlink() or aside.exists():
        _forget(aside, None, say)
    try:
        old = checkpoints_to_delete(save, final, keep)
    except (OSError, CheckpointError) as problem:  # it reads the manifests of older ones
        say(f"{problem}; no older checkpoint was deleted")
        return final
    for earlier in old:
        if earlier.is_symlink():
            say(f"{earlier}: is a link, and stays: keep_last_n_checkpoints deletes what is in {save} itself")
        else:
            _forget(earlier, store, say)
    return final


def _forget(path: Path, store: ObjectStore | None, say: Callable[[str], None]) -> None:
    """Delete an older checkpoint here and in the store; what fails is only said."""
    try:
        if store is not None:
            store.remove(path.name)
        _remove(path)
    except (OSError, CheckpointError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        say(f"{path}: the older checkpoint could not be deleted ({reason}); delete it by hand")
