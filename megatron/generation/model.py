"""A model for inference: this rank's stage with a checkpoint's weights, in any layout."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing import (
    CheckpointError,
    check_model,
    find_checkpoint,
    load_weights,
    read_manifest,
    saved_model,
    verify,
)
from megatron.model import Stage, build_stage
from megatron.model.init import stage_parameters
from megatron.mpu import DTYPES, ParallelGroups, on_rank_zero, together, together_local
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer, with_vocabulary


@dataclass(frozen=True)
class Model:
    """A stage in evaluation mode and all that goes with it. args: of `for_inference`; dtype: of weights and hidden
    states."""

    args: NeoXArgs
    groups: ParallelGroups
    tokenizer: Tokenizer
    stage: Stage
    dtype: torch.dtype


def for_inference(args: NeoXArgs) -> NeoXArgs:
    """Without what only training gains from: sequence parallelism saves activations, and cannot cut a single token;
    compiled blocks would be compiled again for texts of every length."""
    return args.replace(sequence_parallel=False, compile=False)


def load_model(args: NeoXArgs, groups: ParallelGroups, tokenizer: Tokenizer, logger: logging.Logger) -> Model:
    """The weights that `load` (else `save`) and `iteration` name; all ranks call it together.

    Files are verified against the checkpoint's manifest. Raises CheckpointError, or ConfigError for a vocabulary that
    does not fit.
    """
    source = args.load or args.save
    assert source is not None
    path = on_rank_zero(groups, lambda: find_checkpoint(source, args.iteration))
    saved = on_rank_zero(groups, lambda: _saved_model(path, tokenizer))
    if args.padded_vocab_size is None and saved.get("padded_vocab_size"):
        args = args.replace(padded_vocab_size=saved["padded_vocab_size"])
    args = for_inference(with_vocabulary(args, tokenizer))
    check_model(saved, args, str(path))
    _verify_weights(path, groups)
    stage = build_stage(args, groups, log=logger.info)
    parameters = stage_parameters(stage)
    weights = together_local(
        groups,
        lambda: load_weights(
            path,
            args,
            layers=sorted({layer for layer, _, _ in parameters}),
            tensor_rank=groups.rank("tensor"),
            tensor_size=groups.size("tensor"),
        ),
    )
    with torch.no_grad():
        for layer, name, param in parameters:
            param.copy_(weights[layer][name])
    dtype = DTYPES[args.params_dtype]
    logger.info(f"weights of {path}, in {args.params_dtype}")
    return Model(args, groups, tokenizer, stage.to(dtype).eval(), dtype)


def _saved_model(path: Path, tokenizer: Tokenizer) -> Mapping[str, Any]:
    """What a checkpoint says of its model: all of `model_keys` in ours, a few keys in GPT-NeoX's."""
    manifest = read_manifest(path)
    if manifest is not None and manifest.tokenizer not in (None, tokenizer.fingerprint()):
        raise CheckpointError(f"{path}: was trained with another tokenizer; set vocab_file to the one it was")
    return saved_model(path)


def _verify_weights(path: Path, groups: ParallelGroups) -> None:
    """Check the files that hold weights against the manifest, the work shared out over ranks."""
    manifest = read_manifest(path)
    names = sorted(name for name in manifest.files if name.startswith("layer_")) if manifest is not None else []
    own = names[groups.world_rank :: groups.world_size]
    together(groups, lambda: verify(path, own) if own else None)
