"""Reads weights of a layer at any tensor-parallel size, and writes the files of a layer.

The weight map (`megatron.model.weight_map`) says how each parameter is sharded over tensor ranks.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.checkpointing.optimizer_files import AVERAGE, OptimizerFiles
from megatron.checkpointing.parameter_names import to_file_names, to_our_names
from megatron.checkpointing.tensor_files import FileRecord, load_tensors, save_tensors
from megatron.checkpointing.weight_files import WeightFiles, open_weight_files, rows_key
from megatron.data.files import sync
from megatron.model.weight_map import layer_params, shared_params
from megatron.mpu import ParamSpec, shard, unshard
from megatron.neox_arguments import ModelArgs

SCORE_HEAD = "rm_linear.weight"
NO_AVERAGES = "has no averaged weights (its run set no ema_decay); load the last ones, without load_ema or --ema"
_NO_SCORE = (
    ": the checkpoint is a language model; to train a reward model from it, set train_impl: rm and finetune: true"
)
_ONLY_SCORES = ": the checkpoint is a reward model, which gives scores, not text; load a language model"
_MAX_NAMED = 6  # shape mismatches to list; a wrong hidden_size would otherwise list every tensor


def has_score_head(path: str | Path, args: ModelArgs) -> bool:
    """Whether a checkpoint holds a reward model's score head; no weight is read. path: its directory."""
    source, head = open_weight_files(OpenCheckpoint(path, verified=False)), args.num_layers + 4
    return head in source.layers and SCORE_HEAD in source.tensors(head, 0)


def load_weights(
    checkpoint: str | Path | OpenCheckpoint,
    args: ModelArgs,
    *,
    layers: Iterable[int],
    tensor_rank: int,
    tensor_size: int,
    new_head: bool = False,
    params: Mapping[int, Sequence[ParamSpec]] | None = None,
    copy: bool = True,
) -> dict[int, dict[str, Tensor]]:
    """Loads `layers`, sharded for tensor rank `tensor_rank` of `tensor_size`, to the CPU.

    Returns {NeoX layer index: {our name: tensor}}, in the dtypes of the files; {} for a layer without
    parameters. Files are checked against the manifest before they are read. Each rank's file holds a summand
    of a row-parallel bias; the sum is returned.

    checkpoint: an opened checkpoint (if several calls read it), or its directory.
    args: the model's configuration. layers: NeoX indices.
    new_head: leave out the output layer of the files, because the model has its own.
    params: the parameters in the files, if the files lack some of the model's; None: all of the model's.
    copy: false returns memory-mapped tensors and views where possible.
    Raises CheckpointError that lists missing and extra tensors and wrong shapes."""
    source = open_weight_files(checkpoint)
    path = source.path
    expected = layer_params(args) if params is None else params
    if new_head:
        head = args.num_layers + 4
        expected = {layer: specs for layer, specs in expected.items() if layer != head}
        source = replace(source, layers=source.layers - {head})
    _refuse(path, _layer_problems(source, expected, args))
    problems: list[str] = []
    mismatches: list[str] = []
    loaded: dict[int, dict[str, Tensor]] = {}
    for layer in layers:
        specs = expected.get(layer, ())
        loaded[layer] = {}
        if specs:
            loaded[layer] = _load_layer(source, args, layer, specs, tensor_rank, tensor_size, problems, mismatches)
            if copy:  # independent of the memory map and of other tensors
                for name, tensor in loaded[layer].items():
                    loaded[layer][name] = tensor.clone(memory_format=torch.contiguous_format)
            if source.source.averaged:
                loaded[layer] |= _averages(source.source, layer, specs, loaded[layer], tensor_rank, tensor_size)
    for name, owner in shared_params(args).items():
        spec = [spec for spec in expected.get(owner, ()) if spec.name == name]
        if not spec:
            continue
        reference = _load_layer(source, args, owner, spec, tensor_rank, tensor_size, [], [])
        if source.source.averaged and name in reference:
            reference |= _averages(source.source, owner, spec, reference, tensor_rank, tensor_size)
        problems += [
            f"layer {layer}: {name} differs from layer {owner}'s, but all blocks must share it (GPT-NeoX trained one "
            "for each pipeline stage)"
            for layer, tensors in loaded.items()
            if name in reference and name in tensors and not torch.equal(tensors[name], reference[name])
        ]
    problems += mismatches[:_MAX_NAMED]
    if len(mismatches) > _MAX_NAMED:
        problems.append(f"and {len(mismatches) - _MAX_NAMED} more tensors of wrong shape")
    _refuse(path, problems)
    return loaded


def _averages(
    checkpoint: OpenCheckpoint, layer: int, specs: Sequence[ParamSpec], weights: Mapping[str, Tensor],
    tensor_rank: int, tensor_size: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Returns the averages of a layer's trained weights (`ema_decay`), in the dtypes of the weights.

    Raises CheckpointError if the checkpoint has none.
    """
    files, averages = OptimizerFiles(checkpoint), {}
    if not files.has_averages:
        raise CheckpointError(f"{checkpoint.path}: {NO_AVERAGES}")
    trained = files.names([2 if spec.shared else layer for spec in specs])
    for spec in specs:
        if spec.name not in weights or (2 if spec.shared else layer, spec.name) not in trained:
            continue  # weights that were not trained are their own average
        average = files.read(layer, spec, tensor_rank, tensor_size)[AVERAGE]
        averages[spec.name] = average.to(weights[spec.name].dtype)
    return averages


def _refuse(path: Path, problems: Sequence[str]) -> None:
    if problems:
        raise CheckpointError(f"{path}: does not fit this model:\n  " + "\n  ".join(problems))


def _layer_problems(source: WeightFiles, expected: Mapping[int, Sequence[ParamSpec]], args: ModelArgs) -> list[str]:
    """Returns an error line for each layer that only checkpoint or model has, with the key to set."""
    want = {layer for layer, specs in expected.items() if specs}
    predicting = {layer for layer in source.layers - want if "eh_proj.weight" in source.tensors(layer, 0)}
    layers = source.layers
    if args.mtp_num_layers is None:  # a model without multi-token prediction does not read its blocks
        layers = layers - predicting
    # NeoX writes an empty file for a norm without parameters.
    extra = sorted(layer for layer in layers - want if layer not in expected or source.tensors(layer, 0))
    missing = sorted(want - layers)
    if not missing and not extra:
        return []
    if not extra and missing == [args.num_layers + 5 + i for i in range(args.mtp_num_layers or 0)]:
        words = next(words for _, words in _ranges(missing, dict.fromkeys(missing)))
        return [f"no {words}: the checkpoint has no blocks for multi-token prediction; remove mtp_num_layers"]
    last = max(layers - predicting)
    if missing == [args.num_layers + 4] and not extra:
        if args.score_head:
            return [f"no layer {missing[0]} (rm_linear){_NO_SCORE}"]
        return [
            f"no layer {missing[0]} (final_linear): the checkpoint's head is tied to its embedding; set "
            "no_weight_tying: false"
        ]
    if extra == [args.num_layers + 4] and not missing:
        if SCORE_HEAD in source.tensors(extra[0], 0):
            return [f"layer {extra[0]} (rm_linear) is extra{_ONLY_SCORES}"]
        return [
            f"layer {extra[0]} (final_linear) is extra: the checkpoint's head is not tied; set no_weight_tying: true"
        ]
    names = {layer: ", ".join(spec.name for spec in expected[layer]) for layer in missing}
    lines = [f"missing {words}: {names[layer]}" for layer, words in _ranges(missing, names)]
    lines += [f"extra {words}" for _, words in _ranges(extra, dict.fromkeys(extra))]
    blocks = last - (4 if args.no_weight_tying else 3)
    if layers >= {0, *range(2, blocks + 2)} and blocks != args.num_layers:
        lines.append(f"the checkpoint seems to have num_layers: {blocks}, but the model has {args.num_layers}")
    return lines


def _ranges(layers: Sequence[int], content: Mapping[int, Any]) -> Iterator[tuple[int, str]]:
    """Yields the lowest layer of each range of layers with equal content, and words for the range."""
    for _, group in itertools.groupby(enumerate(layers), lambda item: (item[1] - item[0], content[item[1]])):
        numbers = [layer for _, layer in group]
        yield numbers[0], f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]} to {numbers[-1]}"


def _load_layer(
    source: WeightFiles,
    args: ModelArgs,
    layer: int,
    specs: Sequence[ParamSpec],
    tensor_rank: int,
    tensor_size: int,
    problems: list[str],
    mismatches: list[str],
) -> dict[str, Tensor]:
    same_size = source.tensor_size == tensor_size
    need_all = not same_size or (tensor_size > 1 and any(spec.sum_over_tensor for spec in specs))
    names = {spec.name for spec in specs}
    parts: dict[int, dict[str, Tensor]] = {}
    for rank in range(source.tensor_size) if need_all else (tensor_rank,):
        file = source.file(layer, rank)
        rows = rows_key(source.path, args)
        state = to_our_names(layer, source.tensors(layer, rank), names, args, str(file), rows)
        # Expert biases that the checkpoint's run lacked start at 0.
        biases = (spec for spec in specs if spec.name.endswith("expert_bias") and spec.name not in state)
        state |= {spec.name: torch.zeros(spec.shape) for spec in biases}
        for kind, wrong in (("missing", names - state.keys()), ("extra", state.keys() - names)):
            if wrong:
                fix = "; set compat_norm_bias: true" if all(name.endswith("norm.bias") for name in wrong) else ""
                if any(name.endswith("expert_bias") for name in wrong):
                    fix = "; set moe_router_bias_update_rate: 0 to keep it unchanged"
                if SCORE_HEAD in wrong:
                    fix = _NO_SCORE if kind == "missing" else _ONLY_SCORES
                problems.append(f"{file.name}, layer {layer}: {kind} {', '.join(sorted(wrong))}{fix}")
        parts[rank] = state
    out: dict[str, Tensor] = {}
    for spec in specs:
        if any(spec.name not in state for state in parts.values()):
            continue
        tensors = {rank: state[spec.name] for rank, state in parts.items()}
        wrong_shape = next((t for t in tensors.values() if not _has_local_shape(t, spec, source.tensor_size)), None)
        if wrong_shape is not None:
            mismatches.append(f"layer {layer}: {_shape_problem(spec, wrong_shape, source.tensor_size, args)}")
            continue
        out[spec.name] = _local_part(spec, tensors, same_size, tensor_rank, tensor_size)
    return out


def _has_local_shape(tensor: Tensor, spec: ParamSpec, tensor_size: int) -> bool:
    divides = all(n % tensor_size == 0 for n in spec.blocks) if spec.axis is not None else True
    return divides and tuple(tensor.shape) == spec.local_shape(tensor_size)


def _local_part(
    spec: ParamSpec, parts: Mapping[int, Tensor], same_size: bool, tensor_rank: int, tensor_size: int
) -> Tensor:
    if spec.sum_over_tensor:
        # In float64 the sum is exact, so it restores the value that `local_layer_state` divided bit for bit.
        total = torch.stack([part.double() for part in parts.values()]).sum(0)
        return total.to(next(iter(parts.values())).dtype)
    if same_size:
        return parts[tensor_rank]
    if spec.axis is None:
        return parts[0]
    return shard(unshard([parts[rank] for rank in sorted(parts)], spec), spec, tensor_rank, tensor_size)


def _shape_problem(spec: ParamSpec, tensor: Tensor, tensor_size: int, args: ModelArgs) -> str:
    """Returns an error line with the shapes in file and model, and the key that is likely wrong."""
    file_shape, model_shape = tuple(tensor.shape), spec.local_shape(tensor_size)
    rank_text = f" (each of {tensor_size} tensor ranks)" if tensor_size > 1 else ""
    text = f"{spec.name}: has shape {file_shape} in the file, but the model needs {model_shape}{rank_text}"
    if len(file_shape) != len(model_shape):
        return text
    if file_shape == spec.shape:
        return (
            f"{text}; each tensor rank's file holds the full tensor; convert the checkpoint again for one tensor rank"
        )
    full_shape = [n * tensor_size if i == spec.axis else n for i, n in enumerate(file_shape)]
    differs = [i for i, (a, b) in enumerate(zip(full_shape, spec.shape, strict=True)) if a != b]
    hidden = [full_shape[i] for i in differs if spec.shape[i] == args.hidden_size]
    if differs == [0] and spec.name in ("word_embeddings.weight", "final_linear.weight"):
        return f"{text}; the vocabulary is padded differently: set padded_vocab_size: {full_shape[0]}"
    if differs == [0] and spec.name == "position_embeddings.weight":
        return f"{text}; set max_position_embeddings: {full_shape[0]} as in the checkpoint"
    if hidden:
        return f"{text}; set hidden_size: {hidden[0]} as in the checkpoint"
    if "linear" in spec.name:
        return f"{text}; check intermediate_size, activation and compat_ffn_width"
    if "query_key_value" in spec.name:
        return f"{text}; check num_attention_heads and num_kv_heads"
    return text


def local_layer_state(
    layer: int,
    tensors: Mapping[str, Tensor],
    args: ModelArgs,
    *,
    tensor_rank: int,
    tensor_size: int,
    naming: str | None = None,
    copy: bool = True,
    params: Mapping[int, Sequence[ParamSpec]] | None = None,
) -> dict[str, Tensor]:
    """Returns the tensors that tensor rank `tensor_rank` writes to its file of one layer, by the names in
    files.

    layer: its NeoX index. tensors: this rank's parameters, by our names.
    naming: a key of WEIGHT_NAMINGS; None: GPT-NeoX's for `args`.
    copy: copy each tensor to the CPU; false: they are already there, contiguous and with their own storage.
    params: the parameters to write, if not all of the model's; None: all.

    Each rank writes a summand of a row-parallel bias: bias / tensor_size; the last rank writes the remainder,
    so the sum is exact. Raises CheckpointError if `tensors` are not exactly the layer's parameters."""
    specs = {spec.name: spec for spec in (layer_params(args) if params is None else params).get(layer, ())}
    if specs.keys() != tensors.keys():
        raise CheckpointError(
            f"layer {layer}: has tensors {', '.join(sorted(tensors)) or 'nothing'}; "
            f"the model needs {', '.join(sorted(specs)) or 'nothing'}"
        )
    state: dict[str, Tensor] = {}
    for name, spec in specs.items():
        tensor = tensors[name].detach()
        if spec.sum_over_tensor and tensor_size > 1:
            share = tensor / tensor_size
            remainder = tensor - share.double() * (tensor_size - 1)
            tensor = remainder.to(tensor.dtype) if tensor_rank == tensor_size - 1 else share
        state[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format) if copy else tensor
    return to_file_names(layer, state, args, naming)


def save_layer(
    folder: Path,
    layer: int,
    tensors: Mapping[str, Tensor],
    args: ModelArgs,
    naming: str | None = None,
    to_disk: Callable[[Path], None] = sync,
) -> list[FileRecord]:
    """Shards a layer over the tensor ranks of `args`, writes each rank's file, and returns their records.

    layer: its NeoX index. tensors: its full tensors, by our names. naming: a key of WEIGHT_NAMINGS; None:
        GPT-NeoX's for `args`. to_disk: called with the path of each file, to sync it now or later."""
    records, specs = [], layer_params(args)[layer]
    params = {layer: specs}
    for rank in range(args.tp):
        local = {spec.name: _with_own_storage(shard(tensors[spec.name], spec, rank, args.tp)) for spec in specs}
        state = local_layer_state(
            layer, local, args, tensor_rank=rank, tensor_size=args.tp, naming=naming, copy=False, params=params
        )
        records.append(save_tensors(state, folder / layout.layer_file(layer, rank), to_disk=to_disk))
    return records


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Returns `tensor`, or a copy if it is a view: torch.save would write the full storage of a view."""
    owns_storage = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if owns_storage else tensor.clone(memory_format=torch.contiguous_format)


def gather_layers(path: Path, tensor_rank: int) -> dict[str, Tensor]:
    """Returns all tensors in the layer files of one tensor rank, as {"sequential.N.name": tensor}.

    mp_rank files of runs without a pipeline have these names; N is the NeoX layer index."""
    return {
        f"sequential.{layer}.{name}": value
        for (layer, rank), file in sorted(layout.layer_files(path).items())
        if rank == tensor_rank
        for name, value in load_tensors(file).items()
    }
