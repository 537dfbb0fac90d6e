"""Loads a model for inference: this rank's part of it, with the weights of a checkpoint or HuggingFace
model."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

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
from megatron.checkpointing.remote_staging import with_local_model
from megatron.distributed import Process, on_rank_zero, run_on_each_rank
from megatron.model import Model, build_filled_stage, for_inference, layer_params
from megatron.model.inference import LoadLayers
from megatron.mpu import DTYPES, ParallelGroups, init_model_parallel, shard
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.values.lora_settings import merged_adapters
from megatron.tokenizer import Tokenizer, build_tokenizer, with_vocabulary

__all__ = ["Model", "for_inference", "load_model"]


def start_inference(
    args: NeoXArgs, process: Process, logger: logging.Logger, store: Store | None
) -> tuple[NeoXArgs, ParallelGroups, Tokenizer]:
    """Prepares a command that does not train: makes the parallel groups and the tokenizer, and logs startup
    notes.

    Returns the configuration (with remote folders replaced by local copies), the groups and the tokenizer.
    All ranks call this function together. Raises ConfigError, CheckpointError, TokenizerError.

    store: the result of `rendezvous_and_check`.
    """
    args = with_local_model(args)
    groups = init_model_parallel(args, process, logger, store)
    for note in args.startup_notes():
        logger.info(note)
    return args, groups, build_tokenizer(args)


def load_model(args: NeoXArgs, groups: ParallelGroups, tokenizer: Tokenizer, logger: logging.Logger) -> Model:
    """Loads a model for inference from the checkpoint or HuggingFace model that the configuration names.

    That is `load` (else `save`) with `iteration`. Adapters that the checkpoint holds, or that the key
    `adapter` names, are merged into the weights. Files of a checkpoint, except optimizer state, are verified
    against its manifest. All ranks call this function together. Raises CheckpointError, or ConfigError for a
    vocabulary that does not fit.
    """
    source = args.load or args.save
    assert source is not None
    from_hf, adapters = is_hf(source), merged_adapters(args.adapter)
    path = on_rank_zero(groups, lambda: find_hf(source) if from_hf else find_checkpoint(source, args.iteration))
    holds_adapters = not from_hf and on_rank_zero(groups, lambda: is_adapter_checkpoint(path))
    if holds_adapters and adapters:
        raise args.error(
            "adapter",
            f"the checkpoint {path} holds adapters itself; set load to its base model and list all adapters in adapter",
        )
    checkpoint = None
    if args.load_ema and (from_hf or holds_adapters or adapters):
        raise args.error("load_ema", f"{path}: is no checkpoint with averages, or has adapters; remove load_ema")
    if not (from_hf or holds_adapters or adapters):
        checkpoint = run_on_each_rank(groups, lambda: OpenCheckpoint(path, averaged=args.load_ema))
        checkpoint.verify(groups=groups)
    adapter_rows = on_rank_zero(groups, lambda: max([0, *(peft_vocab_size(name) for name, _ in adapters)]))
    args, saved, files, columns = _read_vocabulary(path, from_hf, adapter_rows, args, groups, tokenizer, logger)
    load: LoadLayers
    pairs: list[tuple[AdapterSource, float]] = []
    if checkpoint is not None:
        args = for_inference(with_vocabulary(args, tokenizer))
        check_model(saved, args, str(path))
        load, origin = partial(load_weights, checkpoint, args), str(path)
    elif from_hf and not adapters:
        args = for_inference(args)
        load, origin = hf_loader(path, args), f"{path}, of HuggingFace"
    else:
        base = args.lora["base"] if args.lora is not None else None
        args = for_inference(with_vocabulary(args.replace(lora=None), tokenizer))
        if holds_adapters:
            check_model({**saved, "lora": None}, args, str(path))
        load, origin, pairs = _merging_loader(path, base, adapters, args, groups, tokenizer)
    stage = build_filled_stage(args, groups, load, logger.info, at_once=checkpoint is not None)
    kind = "averaged weights" if args.load_ema else "weights"
    logger.info(f"{kind} of {origin}, in {args.params_dtype}")
    model = Model(
        args, groups, tokenizer, stage, DTYPES[args.params_dtype], columns, source=str(path),
        adapters=tuple((str(adapter.path), factor) for adapter, factor in pairs) if adapters else (),
        declared_eos_ids=declared_eos_ids(files),
    )  # fmt: skip
    if len(model.stop_token_ids) > 1:
        token_texts = [f"{i} {tokenizer.special_tokens.get(i, '')}".rstrip() for i in model.stop_token_ids]
        logger.info(f"generated texts end at the tokens {', '.join(token_texts)}")
    return model


def _read_vocabulary(
    path: Path, from_hf: bool, adapter_rows: int, args: NeoXArgs, groups: ParallelGroups, tokenizer: Tokenizer,
    logger: logging.Logger,
) -> tuple[NeoXArgs, Mapping[str, Any], Mapping[str, bytes], int | None]:  # fmt: skip
    """Reads how large the model's vocabulary is.

    Returns the configuration with the model's `padded_vocab_size`, the model keys that a checkpoint records
    (else {}), the model's companion files, and `Model.columns`.

    adapter_rows: largest vocabulary of the adapters that are merged; 0: none of them has one.
    """
    rows = max(adapter_rows, tokenizer.vocab_size)
    saved: Mapping[str, Any] = {}
    if from_hf:
        padded, message = on_rank_zero(groups, lambda: vocab_size_from_hf(path, args, rows))
        logger.info(message)
        args = args.replace(padded_vocab_size=padded)
    else:
        saved = on_rank_zero(groups, lambda: _saved_model(path, tokenizer))
        if args.padded_vocab_size is None and saved.get("padded_vocab_size"):
            args = args.replace(padded_vocab_size=saved["padded_vocab_size"])
    files = on_rank_zero(groups, lambda: read_companion_files(path if from_hf else path / HF_SUBFOLDER))
    if from_hf:
        return args, saved, files, max(adapter_rows, on_rank_zero(groups, lambda: HFFolder(path).vocab_size))
    return args, saved, files, exported_vocab_size(files, rows)


def _merging_loader(
    path: Path,
    base: str | None,
    adapters: Sequence[tuple[str, float]],
    args: NeoXArgs,
    groups: ParallelGroups,
    tokenizer: Tokenizer,
) -> tuple[LoadLayers, str, list[tuple[AdapterSource, float]]]:
    """Returns a loader of weights with merged adapters, a text that names the weights, and (adapter, factor)
    pairs.

    Adapters are merged one layer at a time, in fp32.

    path: the base weights; if `adapters` is empty, a checkpoint of adapters. base: the weights on which this
        checkpoint was trained.
    adapters: (path, factor) of each adapter.
    """

    def open_all() -> tuple[BaseWeights, list[AdapterSource]]:
        if not adapters:
            return open_with_base([path], base)
        weights = open_base(path, args)
        sources = [open_adapter(name, args) for name, _ in adapters]
        for source in sources:
            check_base(source, weights)
            _check_tokenizer(source.path, source.manifest, tokenizer)
        return weights, sources

    weights, sources = run_on_each_rank(groups, open_all)
    weights.verify(groups)
    for source in sources:
        source.verify(groups)
    pairs = list(zip(sources, [factor for _, factor in adapters] or [1.0], strict=True))
    names = [f"{factor:g} x {source.path}" if factor != 1.0 else str(source.path) for source, factor in pairs]
    load = _sharded_loader(args, merged_reader(weights.read, pairs, torch.float32))
    return load, f"{weights.path} with the adapters of {', '.join(names)} merged in", pairs


def _sharded_loader(args: ModelArgs, read: Callable[[int], Mapping[str, Tensor]]) -> LoadLayers:
    """Returns a function that loads layers and returns a tensor rank's shards: {layer: {parameter name:
    shard}}.

    read: takes a layer index and returns the layer's full parameters by name.
    """
    specs = {layer: {spec.name: spec for spec in layer_specs} for layer, layer_specs in layer_params(args).items()}

    def load(*, layers: Sequence[int], tensor_rank: int, tensor_size: int) -> dict[int, dict[str, Tensor]]:
        return {
            layer: {name: shard(v, specs[layer][name], tensor_rank, tensor_size) for name, v in read(layer).items()}
            for layer in layers
        }

    return load


def _saved_model(path: Path, tokenizer: Tokenizer) -> Mapping[str, Any]:
    """Returns the configuration keys of the model that a checkpoint records. Checkpoints of GPT-NeoX record
    only a few. Raises CheckpointError if the checkpoint was trained with another tokenizer."""
    _check_tokenizer(path, read_manifest(path), tokenizer)
    return saved_model(path)


def _check_tokenizer(path: Path, manifest: Manifest | None, tokenizer: Tokenizer) -> None:
    if manifest is not None and manifest.tokenizer not in (None, tokenizer.fingerprint()):
        raise CheckpointError(
            f"{path}: was trained with another tokenizer; set vocab_file to the one it was trained with"
        )
