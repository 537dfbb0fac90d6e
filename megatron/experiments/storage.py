"""Estimates the size of a run's checkpoints, and refuses to start a run for which a disk has no space."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron.experiments.errors import RunError
from megatron.neox_arguments import NeoXArgs

_GIB = 2**30


def checkpoint_bytes(args: NeoXArgs, cwd: Path) -> int:
    """Returns the estimated size of all checkpoints that a run keeps at the same time.

    A checkpoint has the weights and the optimizer's state. cwd: folder to which relative paths refer.
    """
    import contextlib

    from megatron.planning.size import model_size
    from megatron.tokenizer import build_tokenizer, with_vocabulary

    with contextlib.chdir(cwd):
        if args.padded_vocab_size is None:
            args = with_vocabulary(args, build_tokenizer(args))
    size = model_size(args.for_world(1))
    element = 4 if args.precision == "fp32" else 2
    optimizer = 0 if args.compat_no_save_optim else args.optimizer_bytes * size.trained
    return kept_checkpoints(args) * (element * size.total + optimizer)


def kept_checkpoints(args: NeoXArgs) -> int:
    """Returns how many checkpoints a run has at most, with the one that is being written."""
    saves = set(args.extra_save_iters or ()) | {args.train_iters or 1}
    if args.checkpoint_factor and args.train_iters:
        step = args.checkpoint_factor
        if args.checkpoint_scale == "linear":
            saves |= set(range(int(step), args.train_iters + 1, int(step)))
        elif step > 1:
            power = 1.0
            while power <= args.train_iters:
                saves.add(int(power))
                power *= step
    count = len(saves)
    if args.keep_last_n_checkpoints:
        best = args.keep_best_n_checkpoints or 0
        count = min(count, args.keep_last_n_checkpoints + 1 + best)
    return count


def refuse_without_space(name: str, root: Path, runs: Sequence[tuple[Path, int]], min_free: float) -> None:
    """Raises RunError if the disk has less space than the runs still need, and `min_free` GiB besides.

    name: of the run that is to start. root: folder of the sweep.
    runs: (folder, estimated bytes) of this run and of those that run already.
    """
    needed_bytes = sum(max(0, size - _bytes_below(folder)) for folder, size in runs)
    free = shutil.disk_usage(root).free
    if free < needed_bytes + min_free * _GIB:
        raise RunError(
            f"{name}: not started: {root} has {free / _GIB:.3g} GiB free, but checkpoints need "
            f"{needed_bytes / _GIB:.3g} GiB more, and min_free keeps {min_free:g} GiB; free space, or lower "
            "keep_last_n_checkpoints or min_free"
        )


def _bytes_below(folder: Path) -> int:
    files = folder.rglob("*") if folder.is_dir() else ()
    sizes = {}
    for path in files:
        try:
            if path.is_file() and not path.is_symlink():
                sizes[path.stat().st_ino] = path.stat().st_size  # hard links count once
        except FileNotFoundError:  # deleted by the run
            continue
    return sum(sizes.values())
