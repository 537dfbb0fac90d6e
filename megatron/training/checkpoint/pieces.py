"""Small parts of saving: when HuggingFace's format is due, its layers one by one, a state as bytes."""

import io
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.neox_arguments import NeoXArgs


def is_hf_due(args: NeoXArgs, iteration: int) -> bool:
    """Returns whether HuggingFace's format is written after this iteration."""
    if args.save_hf is None:
        return False
    return iteration == args.train_iters or (args.save_hf > 0 and iteration > 0 and iteration % args.save_hf == 0)


def layers_unless(look: Callable[[], None], layers: Iterable[int], count: int) -> Iterator[int]:
    """Yields the layers, as `export_hf` takes them. look: called before each; an exception ends the
    export."""
    for layer in layers:
        look()
        yield layer


def serialised(state: Any) -> bytes:
    """Returns a state as bytes: a copy of tensors that the next step changes in place."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def empty_folder(parent: Path, folder: Path) -> None:
    """Make `folder` within `parent`, after deleting everything else in `parent`."""
    shutil.rmtree(parent, ignore_errors=True)  # of an interrupted save
    folder.mkdir(parents=True)
