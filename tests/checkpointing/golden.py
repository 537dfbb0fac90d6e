"""Checkpoints that GPT-NeoX itself wrote, and the tensors in them, read by torch alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import CheckpointError, layer_file, load_weights, local_layer_state, save_tensors
from megatron.model.weight_map import layer_params
from megatron.mpu import shard
from megatron.neox_arguments import NeoXArgs, load

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
NEOX, LLAMA = GOLDEN / "ckpt_neox", GOLDEN / "ckpt_llama"
RUNS = {"neox_pp2_mp2": NEOX / "neox_pp2_mp2", "neox_pp1_mp1": NEOX / "neox_pp1_mp1",
        "neox_pp0_mp1": NEOX / "neox_pp0_mp1", "llama_pp1_mp1": LLAMA / "llama_pp1_mp1"}  # fmt: skip
Weights = dict[int, dict[str, Tensor]]


def golden_args(run: str, **changes: object) -> NeoXArgs:
    overrides = {"padded_vocab_size": 384, **changes}
    if run.startswith("llama"):
        overrides = {"compat_ffn_width": "upstream", **overrides}
    return load([RUNS[run] / f"{run}.yml"], overrides)


def checkpoint(run: str, step: int = 3) -> Path:
    return RUNS[run] / "ckpt" / f"global_step{step}"


def raw_layer(run: str, layer: int, rank: int = 0) -> dict[str, Tensor]:
    return read(checkpoint(run), layer, rank)


def full_weights(path: Path, args: NeoXArgs) -> Weights:
    return load_weights(path, args, layers=layer_params(args), tensor_rank=0, tensor_size=1)


def write_at(path: Path, args: NeoXArgs, source: Path, size: int) -> Path:
    """Re-write a checkpoint's layer files at another tensor-parallel size."""
    path.mkdir()
    for rank in range(size):
        weights = load_weights(source, args, layers=layer_params(args), tensor_rank=rank, tensor_size=size)
        for layer, tensors in weights.items():
            state = local_layer_state(layer, tensors, args, tensor_rank=rank, tensor_size=size)
            save_tensors(state, path / layer_file(layer, rank))
    return path


def written(path: Path, args: NeoXArgs, weights: Weights, size: int = 1, naming: str | None = None) -> Path:
    """The layer files of all tensor ranks."""
    path.mkdir(exist_ok=True)
    for rank in range(size):
        for layer, specs in layer_params(args).items():
            local = {spec.name: shard(weights[layer][spec.name], spec, rank, size) for spec in specs}
            state = local_layer_state(layer, local, args, tensor_rank=rank, tensor_size=size, naming=naming)
            save_tensors(state, path / layer_file(layer, rank))
    return path


def read(path: Path, layer: int, rank: int = 0) -> dict[str, Tensor]:
    """A layer file as torch reads it."""
    return torch.load(path / layer_file(layer, rank), weights_only=True)


def fails(facts: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Returns the message of the CheckpointError that a call raises; `facts` must match it."""
    with pytest.raises(CheckpointError, match=facts) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def assert_same(actual: Weights, expected: Weights) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
