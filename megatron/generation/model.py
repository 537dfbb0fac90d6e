"""A model for inference: this rank's stage with a checkpoint's or a HuggingFace model's weights, in any
layout."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import (
    CheckpointError,
    Manifest,
    OpenCheckpoint,
    check_model,
    find_checkpoint,
    load_weights,
    read_manifest,
    saved_model,
)
from megatron.checkpointing.adapters import (
    AdapterSource,
    BaseWeights,
    check_base,
    is_adapter_checkpoint,
    merged_reader,
    open_adapter,
    open_base,
    open_with_base,
    peft_vocab_size,
)
from megatron.checkpointing.huggingface import (
    HF_SUBFOLDER,
    HFFolder,
    declared_eos_ids,
    exported_vocab_size,
    find_hf,
    hf_loader,
    is_hf,
    read_companion_files,
    vocab_size_from_hf,
)
from megatron.distributed import on_rank_zero, run_on_each_rank
from megatron.model import Model, build_filled_stage, for_inference, layer_params
from megatron.mpu import DTYPES, ParallelGroups, shard
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.lora_settings import merged_adapters
from megatron.tokenizer import Tokenizer, with_vocabulary

__all__ = ["Model", "for_inference", "load_model"]


def load_model(args: NeoXArgs, groups: ParallelGroups, tokenizer: Tokenizer, logger: logging.Logger) -> Model:
    """Loads a model for inference from the checkpoint or HuggingFace model that `load` (else `save`) and
    `iteration` name.

    Adapters that the checkpoint holds, or that `adapter` names, are merged into the weights. Files of a
    checkpoint, except optimizer state, are verified against its manifest. All ranks call it together. Raises
    CheckpointError, or ConfigError for a vocabulary that does not fit.
    """
    source = args.load or args.save
    assert source is not None
    from_hf = is_hf(source)
    path = on_rank_zero(groups, lambda: find_hf(source) if from_hf else find_checkpoint(source, args.iteration))
    if merged_adapters(args) or (not from_hf and on_rank_zero(groups, lambda: is_adapter_checkpoint(path))):
        return _load_adapted(path, from_hf, args, groups, tokenizer, logger)
    if from_hf:
        return _load_hf(path, args, groups, tokenizer, logger)
    checkpoint = run_on_each_rank(groups, lambda: OpenCheckpoint(path))
    checkpoint.verify(groups=groups)
    saved = on_rank_zero(groups, lambda: _saved_model(path, tokenizer))
    carried = on_rank_zero(groups, lambda: read_companion_files(path / HF_SUBFOLDER))
    columns, eos_ids = exported_vocab_size(carried, tokenizer.vocab_size), declared_eos_ids(carried)
    if args.padded_vocab_size is None and saved.get("padded_vocab_size"):
        args = args.replace(padded_vocab_size=saved["padded_vocab_size"])
    args = for_inference(with_vocabulary(args, tokenizer))
    check_model(saved, args, str(path))
    stage = build_filled_stage(args, groups, partial(load_weights, checkpoint, args), logger.info, at_once=True)
    logger.info(f"weights of {path}, in {args.params_dtype}")
    dtype, place = DTYPES[args.params_dtype], str(path)
    model = Model(args, groups, tokenizer, stage, dtype, columns, source=place, declared_eos_ids=eos_ids)
    return _log_stop_tokens(model, logger)


def _load_hf(path: Path, args: NeoXArgs, groups: ParallelGroups, tokenizer: Tokenizer, logger: logging.Logger) -> Model:
    rows, message = on_rank_zero(groups, lambda: vocab_size_from_hf(path, args, tokenizer.vocab_size))
    args = for_inference(args.replace(padded_vocab_size=rows))
    stage = build_filled_stage(args, groups, hf_loader(path, args), logger.info, at_once=False)
    logger.info(message)
    logger.info(f"weights of {path}, of HuggingFace, in {args.params_dtype}")
    columns, eos_ids = on_rank_zero(
        groups, lambda: (HFFolder(path).vocab_size, declared_eos_ids(read_companion_files(path)))
    )
    dtype, place = DTYPES[args.params_dtype], str(path)
    model = Model(args, groups, tokenizer, stage, dtype, columns, source=place, declared_eos_ids=eos_ids)
    return _log_stop_tokens(model, logger)


def _load_adapted(
    path: Path, from_hf: bool, args: NeoXArgs, groups: ParallelGroups, tokenizer: Tokenizer, logger: logging.Logger
) -> Model:
    """Returns a model with adapters merged into its weights, one layer at a time in fp32.

    The adapters are those in the checkpoint `path`, else those that the key `adapter` names.
    """
    adapters = merged_adapters(args)
    holds = not from_hf and on_rank_zero(groups, lambda: is_adapter_checkpoint(path))
    if holds and adapters:
        raise args.error("adapter", f"{path}: has its own adapters; set load to its base model, list all in adapter")
    rows = on_rank_zero(groups, lambda: max([0, *(peft_vocab_size(name) for name, _ in adapters)]))
    saved: Mapping[str, Any] = {}
    if from_hf:
        min_vocab_size = max(rows, tokenizer.vocab_size)
        padded, message = on_rank_zero(groups, lambda: vocab_size_from_hf(path, args, min_vocab_size))
        args = args.replace(padded_vocab_size=padded)
        carried = on_rank_zero(groups, lambda: read_companion_files(path))
        columns: int | None = max(rows, on_rank_zero(groups, lambda: HFFolder(path).vocab_size))
        logger.info(message)
    else:
        saved = on_rank_zero(groups, lambda: _saved_model(path, tokenizer))
        carried = on_rank_zero(groups, lambda: read_companion_files(path / HF_SUBFOLDER))
        columns = exported_vocab_size(carried, max(rows, tokenizer.vocab_size))
        if args.padded_vocab_size is None and saved.get("padded_vocab_size"):
            args = args.replace(padded_vocab_size=saved["padded_vocab_size"])
    base = args.lora["base"] if args.lora is not None else None
    args = for_inference(with_vocabulary(args.replace(lora=None), tokenizer))

    def open_all() -> tuple[BaseWeights, list[AdapterSource]]:
        if holds:
            check_model({**saved, "lora": None}, args, str(path))
            return open_with_base([path], base)
        weights = open_base(path, args)
        sources = [open_adapter(name, args) for name, _ in adapters]
        for adapter_source in sources:
            check_base(adapter_source, weights)
            _check_tokenizer(adapter_source.path, adapter_source.manifest, tokenizer)
        return weights, sources

    weights, sources = run_on_each_rank(groups, open_all)
    weights.verify(groups)
    for source in sources:
        source.verify(groups)
    factors = [1.0] if holds else [factor for _, factor in adapters]
    pairs = list(zip(sources, factors, strict=True))
    load = _sharded_loader(args, merged_reader(weights.read, pairs, torch.float32))
    stage = build_filled_stage(args, groups, load, logger.info, at_once=False)
    sources_text = ", ".join(
        f"{factor:g} x {adapter_source.path}" if factor != 1.0 else str(adapter_source.path)
        for adapter_source, factor in pairs
    )
    logger.info(f"weights of {weights.path} with the adapters of {sources_text} merged in, in {args.params_dtype}")
    model = Model(
        args, groups, tokenizer, stage, DTYPES[args.params_dtype], columns, source=str(path),
        adapters=() if holds else tuple((str(adapter_source.path), factor) for adapter_source, factor in pairs),
        declared_eos_ids=declared_eos_ids(carried),
    )  # fmt: skip
    return _log_stop_tokens(model, logger)


def _sharded_loader(
    args: NeoXArgs, read: Callable[[int], Mapping[str, Tensor]]
) -> Callable[..., dict[int, dict[str, Tensor]]]:
    """Returns a function that loads layers and returns a tensor rank's shards: {layer: {parameter name:
    shard}}.

    read: returns the full parameters of a layer, by name.
    """
    specs = {layer: {spec.name: spec for spec in layer_specs} for layer, layer_specs in layer_params(args).items()}

    def load(*, layers: Sequence[int], tensor_rank: int, tensor_size: int) -> dict[int, dict[str, Tensor]]:
        return {
            layer: {name: shard(v, specs[layer][name], tensor_rank, tensor_size) for name, v in read(layer).items()}
            for layer in layers
        }

    return load


def _log_stop_tokens(model: Model, logger: logging.Logger) -> Model:
    """Logs the stop tokens of a model if it has several, and returns the model."""
    if len(model.stop_token_ids) > 1:
        token_texts = [f"{i} {model.tokenizer.special_tokens.get(i, '')}".rstrip() for i in model.stop_token_ids]
        logger.info(f"texts end at the tokens {', '.join(token_texts)}")
    return model


def _saved_model(path: Path, tokenizer: Tokenizer) -> Mapping[str, Any]:
    """Returns the model keys that a checkpoint records. Ours record all of `model_keys`, GPT-NeoX's a few.
    Raises CheckpointError if the checkpoint was trained with another tokenizer."""
    _check_tokenizer(path, read_manifest(path), tokenizer)
    return saved_model(path)


def _check_tokenizer(path: Path, manifest: Manifest | None, tokenizer: Tokenizer) -> None:
    if manifest is not None and manifest.tokenizer not in (None, tokenizer.fingerprint()):
        raise CheckpointError(f"{path}: was trained with another tokenizer; set vocab_file to that tokenizer")
