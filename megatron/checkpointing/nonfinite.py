"""NaN and Inf in weights and optimizer state: never stored, and named where a file holds them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.errors import NonFiniteStateError
from megatron.checkpointing.layout import is_optimizer_file
from megatron.checkpointing.tensor_files import load_tensors, named_tensors


def check_finite(name: str, state: Any) -> None:
    """Raise NonFiniteStateError when a file `name` of weights or optimizer state would hold NaN or Inf. Other files
    may hold them. One pass over each tensor without a copy, several times faster than its checksum."""
    if not (name.startswith("layer_") or is_optimizer_file(name)):
        return
    for path, tensor in named_tensors(state):
        # NaN anywhere makes both of them NaN.
        if tensor.is_floating_point() and tensor.numel() and not all(map(torch.isfinite, torch.aminmax(tensor))):
            raise NonFiniteStateError(f"{name} ({path} is not finite)")


def verify_finite(path: Path, names: Iterable[str], optimizer: bool) -> None:
    """`check_finite` of these files of a checkpoint, of the optimizer's state only if that is wanted. Raises
    NonFiniteStateError that says what to do."""
    for name in names:
        if name.startswith("layer_") or (optimizer and name.startswith("optim_")):
            try:
                check_finite(name, load_tensors(path / name))
            except NonFiniteStateError as problem:
                fresh = ", or set no_load_optim: true" if is_optimizer_file(name) else ""
                raise NonFiniteStateError(f"{path}: {problem}; load another `iteration`{fresh}") from problem
