"""Where a run starts from: its own `save`, the checkpoint or HuggingFace model that `load` names, or nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpointing import (
    CheckpointError,
    DamagedError,
    find_checkpoint,
    list_checkpoints,
    read_latest,
    read_manifest,
    saved_model,
    step_of,
)
from megatron.checkpointing.huggingface import adopted_rows, find_hf, is_hf
from megatron.neox_arguments import NeoXArgs


@dataclass(frozen=True)
class Source:
    """path: a checkpoint directory, None for a fresh start; goes_on: it is this run's own, from `save`; is_hf: it is a
    HuggingFace folder."""

    path: Path | None
    goes_on: bool
    is_hf: bool = False


def choose_source(args: NeoXArgs) -> Source:
    """`save` if it holds checkpoints (unless `restart`), else `load`, else nothing. Raises CheckpointError."""
    same = bool(args.load and args.save) and Path(args.load or "").resolve() == Path(args.save or "").resolve()
    if args.save is not None and not args.restart and (read_latest(args.save) or list_checkpoints(args.save)):
        found = find_checkpoint(args.save, args.iteration if same or args.load is None else None)
        return Source(_with_manifest(found, args), True)
    if args.load is None or (same and (args.restart or not list_checkpoints(args.load))):
        if args.iteration is not None:
            raise CheckpointError(f"iteration: {args.iteration}, but there is no checkpoint in {args.load}")
        return Source(None, False)
    if is_hf(args.load):
        return Source(find_hf(args.load), False, is_hf=True)
    return Source(_with_manifest(find_checkpoint(args.load, args.iteration), args), False)


def earlier_checkpoint(path: Path) -> Path | None:
    """The checkpoint before this one in its folder."""
    before = [p for p in list_checkpoints(path.parent) if step_of(p) < step_of(path)]
    return before[-1] if before else None


def _with_manifest(path: Path, args: NeoXArgs) -> Path:
    """`path`, or with `load_fallback` the one before whose manifest, if it has one, can be read. DamagedError."""
    while True:
        try:
            read_manifest(path)
            return path
        except DamagedError as problem:
            earlier = earlier_checkpoint(path) if args.load_fallback else None
            if earlier is None:
                raise
            logging.getLogger("megatron").warning(f"{problem}; load_fallback: trying {earlier}")
            path = earlier


def adopt_vocabulary(args: NeoXArgs, source: Source, vocab_size: int) -> NeoXArgs:
    """`padded_vocab_size` of the checkpoint, where the configuration leaves it open.

    vocab_size: of the tokenizer. Raises CheckpointError when the checkpoint's is smaller.
    """
    if args.padded_vocab_size is not None or source.path is None:
        return args
    if source.is_hf:
        return args.replace(padded_vocab_size=adopted_rows(source.path, args, vocab_size)[0])
    size = saved_model(source.path).get("padded_vocab_size")
    if not size:
        return args
    if size < vocab_size:
        raise CheckpointError(
            f"{source.path}: was trained with another tokenizer, of at most {size} tokens; this one has {vocab_size}; "
            "set vocab_file to the one it was"
        )
    return args.replace(padded_vocab_size=int(size))
