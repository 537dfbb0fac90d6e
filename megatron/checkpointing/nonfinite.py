"""Refuses NaN and Inf in weights and optimizer state, when they are saved and when they are loaded."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.errors import NonFiniteStateError
from megatron.checkpointing.layout import is_optimizer_file
from megatron.checkpointing.tensor_files import load_tensors, named_tensors


def check_finite(name: str, state: Any) -> None:
    """Raise NonFiniteStateError if `state`, the content of file `name`, holds NaN or Inf.

    Only files of weights and of optimizer state are checked. The check reads each tensor once, without a
    copy, several times faster than a checksum.
    """
    if not (name.startswith("layer_") or is_optimizer_file(name)):
        return
    for path, tensor in named_tensors(state):
        # NaN anywhere makes minimum and maximum NaN.
        if tensor.is_floating_point() and tensor.numel() and not all(map(torch.isfinite, torch.aminmax(tensor))):
            raise NonFiniteStateError(f"{name} ({path} is not finite: NaN or Inf)")


def verify_finite(path: Path, names: Iterable[str], optimizer: bool) -> None:
    """Raise NonFiniteStateError if weights in files `names` of checkpoint `path` hold NaN or Inf.

    optimizer: also check its optimizer state.
    """
    for name in names:
        if name.startswith("layer_") or (optimizer and name.startswith("optim_")):
            try:
                check_finite(name, load_tensors(path / name))
            except NonFiniteStateError as problem:
                fresh = ", or set no_load_optim: true" if is_optimizer_file(name) else ""
                raise NonFiniteStateError(f"{path}: {problem}; load another `iteration`{fresh}") from problem
