"""NaN and Inf in weights and optimizer state are never stored, and named where a file holds them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.errors import NonFiniteStateError
from megatron.checkpointing.layout import is_optimizer_file
from megatron.checkpointing.tensor_files import load_tensors, named_tensors


def check_finite(name: str, state: Any) -> None:
    """Raise NonFiniteStateError when `state`, to be written as file `name`, holds NaN or Inf.

    Only files of weights and of optimizer state are checked. It takes one pass over each tensor without a
    copy, several times faster than its checksum.
    """
    if not (name.startswith("layer_") or is_optimizer_file(name)):
        return
    for path, tensor in named_tensors(state):
        # NaN anywhere makes both of them NaN.
        if tensor.is_floating_point() and tensor.numel() and not all(map(torch.isfinite, torch.aminmax(tensor))):
            raise NonFiniteStateError(f"{name} ({path} is not finite)")


def verify_finite(path: Path, names: Iterable[str], optimizer: bool) -> None:
    """Check the weights in files `names` of checkpoint `path`, and with `optimizer` its optimizer state.

    Raises NonFiniteStateError that says what to do.
    """
    for name in names:
        if name.startswith("layer_") or (optimizer and name.startswith("optim_")):
            try:
                check_finite(name, load_tensors(path / name))
            except NonFiniteStateError as problem:
                fresh = ", or set no_load_optim: true" if is_optimizer_file(name) else ""
                raise NonFiniteStateError(f"{path}: {problem}; load another `iteration`{fresh}") from problem
