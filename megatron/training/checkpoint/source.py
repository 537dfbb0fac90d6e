"""Chooses what a run starts from: a checkpoint in its own `save`, the checkpoint or HuggingFace model that
`load` names, or fresh weights."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatron.checkpointing import (
    CheckpointError,
    DamagedError,
    OpenCheckpoint,
    find_checkpoint,
    list_checkpoints,
    read_latest,
    read_manifest,
    step_of,
)
from megatron.checkpointing.adapters import saved_rows
from megatron.checkpointing.huggingface import (
    HF_SUBFOLDER,
    HFFolder,
    exported_vocab_size,
    find_hf,
    is_hf,
    read_companion_files,
    vocab_size_from_hf,
)
from megatron.checkpointing.remote_staging import fetch_staged_checkpoint, mirror_remote_checkpoints, remote_folders
from megatron.neox_arguments import NeoXArgs

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointSource:
    """The source of the weights, and perhaps the state, from which a run starts.

    path: a checkpoint folder; None: fresh weights.
    goes_on: `path` is this run's own checkpoint, in `save`, from which it resumes.
    is_hf: `path` is a HuggingFace folder.
    fallback: for a copy of a later step on this machine (`local_saves.py`): the source without that copy.
    """

    path: Path | None
    goes_on: bool
    is_hf: bool = False
    fallback: "CheckpointSource | None" = None


def choose_source(args: NeoXArgs) -> CheckpointSource:
    """Returns the source of a run: a checkpoint in `save` unless `restart` is set, else `load`, else fresh
    weights.

    Raises CheckpointError if `iteration` or `load` names a checkpoint that does not exist.
    """
    save, load = args.save_dir, args.load_dir
    is_same_folder = bool(load and save) and Path(load or "").resolve() == Path(save or "").resolve()
    if save is not None and not args.restart and (read_latest(save) or list_checkpoints(save)):
        checkpoint = _saved_checkpoint(Path(save), args.iteration if is_same_folder or load is None else None)
        return CheckpointSource(_with_manifest(checkpoint, args), True)
    if load is None or (is_same_folder and (args.restart or not list_checkpoints(load))):
        if args.iteration is not None:
            raise CheckpointError(f"iteration: {args.iteration}{_missing_checkpoint_reason(args)}")
        return CheckpointSource(None, False)
    return _loaded_checkpoint(args, load)


def _missing_checkpoint_reason(args: NeoXArgs) -> str:
    if args.load is None:
        return " needs a checkpoint to load; set load, or remove iteration"
    if args.restart and list_checkpoints(args.load):
        return f", but restart: true ignores the checkpoints in {args.load}; remove one of the two keys"
    return f", but {args.load} holds no checkpoint; correct load, or remove iteration"


def _saved_checkpoint(save: Path, iteration: int | None) -> Path:
    saved = list_checkpoints(save)
    if iteration is None and len(saved) == 1 and read_latest(save) is None and read_manifest(saved[0]) is not None:
        return saved[0]  # it is complete, but the run ended before it could write its first `latest`
    return find_checkpoint(save, iteration)


def original_source(args: NeoXArgs) -> CheckpointSource:
    """Returns the source from which a run that now resumes from `save` first started: `load`, or fresh
    weights.

    Raises CheckpointError if that checkpoint does not exist.
    """
    load, save = args.load_dir, args.save_dir
    if load is None or Path(load).resolve() == Path(save or "").resolve():
        return CheckpointSource(None, False)
    return _loaded_checkpoint(args, load)


def _loaded_checkpoint(args: NeoXArgs, load: str) -> CheckpointSource:
    if is_hf(load):
        return CheckpointSource(find_hf(load), False, is_hf=True)
    return CheckpointSource(_with_manifest(find_checkpoint(load, args.iteration), args), False)


def check_averaged(args: NeoXArgs, source: CheckpointSource) -> None:
    """Raise ConfigError if `load_ema` is set, but the run begins from no averaged weights alone."""
    if not args.load_ema or source.goes_on:
        return
    if source.path is None or source.is_hf:
        raise args.error("load_ema", "needs a checkpoint with averages; name it by load, or remove load_ema")
    if not args.finetune:
        raise args.error("load_ema", "takes weights alone; set finetune: true, or remove load_ema")
    if args.lora is not None:
        raise args.error("load_ema", "is not built with lora; export the average (--ema), and load that folder")


def fetch_remote_source(args: NeoXArgs) -> None:
    """Fetch the checkpoint or model that the run starts from, if it is remote; else do nothing.

    If that checkpoint is damaged, it fetches an earlier one with `load_fallback`. Every machine calls it
    before its ranks wait for others in collectives.
    """
    if args.load is not None and is_hf(args.load):
        find_hf(args.load)  # may download
    if not remote_folders(args):
        return
    mirror_remote_checkpoints(args, writes=True)
    path = choose_source(args).path
    if path is not None:
        fetch = partial(fetch_staged_checkpoint, args)
        or_earlier(args, path, fetch, lambda earlier: f"fetching {earlier.name} too")


def or_earlier(
    args: NeoXArgs, path: Path, work: Callable[[Path], T], action: Callable[[Path], str] = lambda path: f"trying {path}"
) -> tuple[Path, T]:
    """Returns (path, result) of the first checkpoint for which `work` does not raise DamagedError.

    It tries `path`, then with `load_fallback` earlier checkpoints in the same folder. action: returns words
    for the log before an earlier one is tried. Raises DamagedError if all are damaged.
    """
    while True:
        try:
            return path, work(path)
        except DamagedError as problem:
            checkpoints = list_checkpoints(path.parent) if args.load_fallback else []
            earlier = [candidate for candidate in checkpoints if step_of(candidate) < step_of(path)]
            if not earlier:
                raise
            path = earlier[-1]
            logging.getLogger("megatron").warning(f"{problem}; load_fallback: {action(path)}")


def _with_manifest(path: Path, args: NeoXArgs) -> Path:
    """Returns `path` after checking the files that are read before the weights; with `load_fallback` maybe an
    earlier checkpoint.

    These files are the manifest, if there is one, and those of the tokenizer and of an imported model. Raises
    DamagedError if one is damaged.
    """

    def check(candidate: Path) -> None:
        checkpoint = OpenCheckpoint(candidate)
        # Of a remote checkpoint that is not fetched yet, only the manifest is here.
        checkpoint.verify(name for name in checkpoint.names if "/" in name and (candidate / name).is_file())

    return or_earlier(args, path, check)[0]


def adopt_vocabulary(args: NeoXArgs, source: CheckpointSource, vocab_size: int) -> NeoXArgs:
    """Returns the configuration with `padded_vocab_size` taken from the checkpoint, if the user has not set
    the key.

    vocab_size: of the tokenizer. Raises CheckpointError if the checkpoint's vocabulary is smaller.
    """
    if args.padded_vocab_size is not None or source.path is None:
        return args
    if source.is_hf:
        return args.replace(padded_vocab_size=vocab_size_from_hf(source.path, args, vocab_size)[0])
    size = saved_rows(source.path, args, vocab_size)
    if not size:
        return args
    if size < vocab_size:
        raise CheckpointError(
            f"vocab_file: {args.vocab_file} ({args.origin('vocab_file')}) has {vocab_size} tokens, but {source.path} "
            f"was trained with another tokenizer, of at most {size} tokens; set vocab_file to that one"
        )
    return args.replace(padded_vocab_size=int(size))


def real_rows(source: CheckpointSource, tokens: int) -> int | None:
    """Returns the number of vocabulary rows that stand for tokens, as the HuggingFace config of the source
    says.

    None if the source has no such config: fresh weights, or a checkpoint that was not imported. tokens: size
    of the tokenizer's vocabulary.
    """
    if source.path is None:
        return None
    if source.is_hf:
        return max(HFFolder(source.path).vocab_size, tokens)
    return exported_vocab_size(read_companion_files(source.path / HF_SUBFOLDER), tokens)


def mask_padding(args: NeoXArgs, real: int | None, tokens: int) -> NeoXArgs:
    """Returns the configuration with `mask_padded_vocab` resolved to the number of rows that are not masked.

    It becomes false if no row is masked. real: from `real_rows`. tokens: size of the tokenizer's vocabulary.
    Raises ConfigError if the key gives fewer rows than the tokenizer has tokens.
    """
    setting = args.mask_padded_vocab
    rows_by_setting = {True: tokens, False: None, "auto": real}
    rows = rows_by_setting[setting] if isinstance(setting, bool | str) else setting
    if rows is not None and rows < tokens:
        raise args.error("mask_padded_vocab", f"{rows} rows are fewer than the tokenizer's {tokens} tokens; write true")
    masks = rows is not None and args.padded_vocab_size is not None and rows < args.padded_vocab_size
    return args.replace(mask_padded_vocab=rows if masks else False)
