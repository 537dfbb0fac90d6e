"""Replaces the weights of a model that is being served, as reinforcement learning does after its steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.huggingface import load_hf_weights
from megatron.checkpointing.huggingface.folder import INDEX, WEIGHTS
from megatron.data.files import sha256
from megatron.distributed import on_rank_zero, run_on_each_rank
from megatron.model import Model
from megatron.model.init import stage_parameters


@dataclass(frozen=True)
class WeightUpdate:
    """New weights for a model that is being served.

    path: a HuggingFace folder with safetensors files.
    version: the number of the new weights, which later answers report.
    sha256: {file name: expected SHA-256} of files in the folder.
    """

    path: str
    version: int
    sha256: Mapping[str, str] = field(default_factory=dict)


def update_weights(model: Model, update: WeightUpdate) -> None:
    """Replaces the weights of a model while it runs no requests. All ranks call this function together.

    If the folder does not fit the model or a file is damaged, it raises CheckpointError and keeps the old
    weights.
    """
    groups, parameters = model.groups, stage_parameters(model.stage)
    on_rank_zero(groups, lambda: _check(update))
    layers = sorted({layer for layer, _, _ in parameters})
    load = partial(load_hf_weights, tensor_rank=groups.rank("tensor"), tensor_size=groups.size("tensor"))
    weights = run_on_each_rank(groups, lambda: load(update.path, model.args, layers=layers))
    with torch.no_grad():
        for layer, name, parameter in parameters:
            parameter.copy_(weights[layer][name])


def _check(update: WeightUpdate) -> None:
    folder = Path(update.path)
    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        raise CheckpointError(
            f"{folder}: has neither {WEIGHTS} nor {INDEX}; name a HuggingFace folder that rank 0's machine can see"
        )
    for name, digest in update.sha256.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: no such file, but sha256 names it; correct the folder or sha256")
        if (actual := sha256(folder / name)) != digest:
            raise CheckpointError(
                f"{folder / name}: has SHA-256 {actual}, not {digest}: the file is damaged or was replaced"
            )
