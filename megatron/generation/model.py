"""A model for inference: this rank's stage with a checkpoint's or a HuggingFace model's weights, in any
layout."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import (
    CheckpointError,
    check_model,
    find_checkpoint,
    load_weights,
    read_manifest,
    saved_model,
    verify,
)
from megatron.checkpointing.huggingface import (
    HF_SUBFOLDER,
    HFFolder,
    declared_eos_ids,
    exported_vocab_size,
    find_hf,
    is_hf,
    load_hf_weights,
    read_companion_files,
    vocab_size_from_hf,
)
from megatron.distributed import on_rank_zero, run_on_all_ranks, run_on_each_rank
from megatron.model import Model, Stage, build_stage, for_inference, materialize
from megatron.model.init import stage_parameters
from megatron.mpu import DTYPES, ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer, with_vocabulary

__all__ = ["Model", "for_inference", "load_model"]

_Load = Callable[..., Mapping[int, Mapping[str, Tensor]]]


def load_model(args: NeoXArgs, groups: ParallelGroups, tokenizer: Tokenizer, logger: logging.Logger) -> Model:
    """The weights that `load` (else `save`) and `iteration` name, of a checkpoint or, as they are, of a
    HuggingFace model; all ranks call it together.

    Files of a checkpoint are verified against its manifest. Raises CheckpointError, or ConfigError for a
    vocabulary that does not fit.
    """
    source = args.load or args.save
    assert source is not None
    if is_hf(source):
        return _load_hf(on_rank_zero(groups, lambda: find_hf(source)), args, groups, tokenizer, logger)
    path = on_rank_zero(groups, lambda: find_checkpoint(source, args.iteration))
    saved = on_rank_zero(groups, lambda: _saved_model(path, tokenizer))
    carried = on_rank_zero(groups, lambda: read_companion_files(path / HF_SUBFOLDER))
    columns, eos_ids = exported_vocab_size(carried, tokenizer.vocab_size), declared_eos_ids(carried)
    if args.padded_vocab_size is None and saved.get("padded_vocab_size"):
        args = args.replace(padded_vocab_size=saved["padded_vocab_size"])
    args = for_inference(with_vocabulary(args, tokenizer))
    check_model(saved, args, str(path))
    _verify_weights(path, groups)
    stage = _build_filled_stage(args, groups, partial(load_weights, path, args), logger, at_once=True)
    logger.info(f"weights of {path}, in {args.params_dtype}")
    dtype, place = DTYPES[args.params_dtype], str(path)
    model = Model(args, groups, tokenizer, stage, dtype, columns, source=place, declared_eos_ids=eos_ids)
    return _log_stop_tokens(model, logger)


def _load_hf(path: Path, args: NeoXArgs, groups: ParallelGroups, tokenizer: Tokenizer, logger: logging.Logger) -> Model:
    rows, message = on_rank_zero(groups, lambda: vocab_size_from_hf(path, args, tokenizer.vocab_size))
    args = for_inference(args.replace(padded_vocab_size=rows))
    stage = _build_filled_stage(args, groups, partial(load_hf_weights, path, args), logger, at_once=False)
    logger.info(message)
    logger.info(f"weights of {path}, of HuggingFace, in {args.params_dtype}")
    columns, eos_ids = on_rank_zero(
        groups, lambda: (HFFolder(path).vocab_size, declared_eos_ids(read_companion_files(path)))
    )
    dtype, place = DTYPES[args.params_dtype], str(path)
    model = Model(args, groups, tokenizer, stage, dtype, columns, source=place, declared_eos_ids=eos_ids)
    return _log_stop_tokens(model, logger)


def _log_stop_tokens(model: Model, logger: logging.Logger) -> Model:
    """The same model, after a line in the log where more than the end of document ends its texts."""
    if len(model.stop_token_ids) > 1:
        named = [f"{i} {model.tokenizer.special_tokens.get(i, '')}".rstrip() for i in model.stop_token_ids]
        logger.info(f"texts end at the tokens {', '.join(named)}")
    return model


def _build_filled_stage(
    args: NeoXArgs, groups: ParallelGroups, load: _Load, logger: logging.Logger, *, at_once: bool
) -> Stage:
    """This rank's stage with the weights that `load` returns for a list of layers.

    at_once: read all layers together, so that an error names what is wrong in any of them; else one layer
    after the other, which needs less memory.
    """
    stage = build_stage(args, groups, log=logger.info)
    materialize(stage, DTYPES[args.params_dtype]).eval()
    layers = sorted({layer for layer, _, _ in stage_parameters(stage)})

    @torch.no_grad()
    def fill() -> None:
        for part in [layers] if at_once else [[layer] for layer in layers]:
            weights = load(layers=part, tensor_rank=groups.rank("tensor"), tensor_size=groups.size("tensor"))
            for layer, name, param in stage_parameters(stage):
                if layer in weights:
                    param.copy_(weights[layer][name])

    run_on_each_rank(groups, fill)
    return stage


def _saved_model(path: Path, tokenizer: Tokenizer) -> Mapping[str, Any]:
    """The model keys that a checkpoint records: all of `model_keys` in ours, a few in GPT-NeoX's. Raises
    CheckpointError where it was trained with another tokenizer."""
    manifest = read_manifest(path)
    if manifest is not None and manifest.tokenizer not in (None, tokenizer.fingerprint()):
        raise CheckpointError(f"{path}: was trained with another tokenizer; set vocab_file to the one it was")
    return saved_model(path)


def _verify_weights(path: Path, groups: ParallelGroups) -> None:
    """Check the files that hold weights against the manifest, each rank some of them. Raises
    CheckpointError."""
    manifest = read_manifest(path)
    names = sorted(name for name in manifest.files if name.startswith("layer_")) if manifest is not None else []
    local_names = names[groups.world_rank :: groups.world_size]
    run_on_all_ranks(groups, lambda: verify(path, local_names) if local_names else None)
