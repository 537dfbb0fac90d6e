"""Model weights: reading a layer at any tensor-parallel size, and writing the file of a layer.

How a parameter is split over tensor ranks is the knowledge of the weight map (`megatron.model.weight_map`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.checkpointing.parameter_names import to_file_names, to_our_names
from megatron.checkpointing.tensor_files import FileRecord, load_tensors, save_tensors
from megatron.checkpointing.weight_files import WeightFiles, open_weight_files, rows_key
from megatron.data.files import sync
from megatron.model.weight_map import layer_params, shared_params
from megatron.mpu import ParamSpec, shard, unshard
from megatron.neox_arguments import NeoXArgs

SCORE_HEAD = "rm_linear.weight"
_NO_SCORE = ": a language model, from which train_impl: rm begins with finetune: true"
_ONLY_SCORES = ": a reward model, which gives scores and no text"
_SHOWN = 6  # shape mismatches named in full; a wrong hidden_size would otherwise name every tensor


def has_score_head(path: str | Path, args: NeoXArgs) -> bool:
    """Whether the weights of a checkpoint directory are a reward model's; none is read."""
    source, head = open_weight_files(OpenCheckpoint(path, verified=False)), args.num_layers + 4
    return head in source.layers and SCORE_HEAD in source.tensors(head, 0)


def load_weights(
    checkpoint: str | Path | OpenCheckpoint,
    args: NeoXArgs,
    *,
    layers: Iterable[int],
    tensor_rank: int,
    tensor_size: int,
    new_head: bool = False,
    params: Mapping[int, Sequence[ParamSpec]] | None = None,
    copy: bool = True,
) -> dict[int, dict[str, Tensor]]:
    """Load the tensors of `layers` that tensor rank `tensor_rank` of `tensor_size` holds, to the CPU.

    checkpoint: one checkpoint, opened where several calls read it, or its directory (`find_checkpoint`);
    files are checked against the manifest before they are read. Returns the tensors by NeoX layer index and
    our name, in the dtypes of the files; {} for layers without parameters. new_head: the model has an output
    layer of its own, and that of the files is left out. params: those that the files hold, where that is a
    part of the model; None: all. copy: false leaves tensors in the files (memory maps) until they are used,
    where they need not be put together; they may be views. A row-parallel bias that is a sum over
    ranks on disk is returned summed. Raises CheckpointError that lists every missing or extra tensor and the
    shapes that do not fit.
    """
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
            if copy:  # off the memory map, off other tensors
                for name, tensor in loaded[layer].items():
                    loaded[layer][name] = tensor.clone(memory_format=torch.contiguous_format)
    for name, owner in shared_params(args).items():
        spec = [spec for spec in expected.get(owner, ()) if spec.name == name]
        if not spec:
            continue
        first = _load_layer(source, args, owner, spec, tensor_rank, tensor_size, [], [])
        problems += _shared_problems(owner, first, loaded)
    problems += mismatches[:_SHOWN]
    if len(mismatches) > _SHOWN:
        problems.append(f"and {len(mismatches) - _SHOWN} more tensors of another shape")
    _refuse(path, problems)
    return loaded


def _shared_problems(owner: int, first: Mapping[str, Tensor], loaded: Mapping[int, Mapping[str, Tensor]]) -> list[str]:
    """A line for each copy of a shared parameter that differs from that of layer `owner`."""
    return [
        f"layer {layer}: {name} is another than layer {owner}'s (GPT-NeoX trained one a pipeline stage); the blocks "
        "share one"
        for layer, tensors in loaded.items()
        for name in first
        if name in tensors and not torch.equal(tensors[name], first[name])
    ]


def _refuse(path: Path, problems: Sequence[str]) -> None:
    if problems:
        raise CheckpointError(f"{path}: does not fit this model:\n  " + "\n  ".join(problems))


def _layer_problems(source: WeightFiles, expected: Mapping[int, Sequence[ParamSpec]], args: NeoXArgs) -> list[str]:
    """A line for each layer that only the checkpoint or only the model has, with the key that would fix
    it."""
    want = {layer for layer, specs in expected.items() if specs}
    # NeoX writes an empty file for a norm without parameters.
    extra = sorted(layer for layer in source.layers - want if layer not in expected or source.tensors(layer, 0))
    missing = sorted(want - source.layers)
    if not missing and not extra:
        return []
    last = max(source.layers)
    if missing == [args.num_layers + 4] and not extra:
        if args.score_head:
            return [f"no layer {missing[0]} (rm_linear){_NO_SCORE}"]
        return [f"no layer {missing[0]} (final_linear): its output layer is the embedding; set no_weight_tying: false"]
    if extra == [args.num_layers + 4] and not missing:
        if SCORE_HEAD in source.tensors(extra[0], 0):
            return [f"layer {extra[0]} (rm_linear) is extra{_ONLY_SCORES}"]
        return [f"layer {extra[0]} (final_linear) is extra: its output layer is its own; set no_weight_tying: true"]
    lines = [f"missing layer {n}: {', '.join(spec.name for spec in expected[n])}" for n in missing]
    lines += [f"extra layer {n}" for n in extra]
    blocks = last - (4 if args.no_weight_tying else 3)
    if source.layers >= {0, *range(2, blocks + 2)} and blocks != args.num_layers:
        lines.append(f"the checkpoint seems to have num_layers: {blocks}, the model has {args.num_layers}")
    return lines


def _load_layer(
    source: WeightFiles,
    args: NeoXArgs,
    layer: int,
    specs: Sequence[ParamSpec],
    tensor_rank: int,
    tensor_size: int,
    problems: list[str],
    mismatches: list[str],
) -> dict[str, Tensor]:
    same_cut = source.tensor_size == tensor_size
    need_all = not same_cut or (tensor_size > 1 and any(spec.sum_over_tensor for spec in specs))
    names = {spec.name for spec in specs}
    parts: dict[int, dict[str, Tensor]] = {}
    for rank in range(source.tensor_size) if need_all else (tensor_rank,):
        file = source.file(layer, rank)
        rows = rows_key(source.path, args)
        state = to_our_names(layer, source.tensors(layer, rank), names, args, str(file), rows)
        # A bias that the checkpoint's run did not have was 0 there.
        state |= {spec.name: torch.zeros(spec.shape) for spec in specs if not spec.trained and spec.name not in state}
        for kind, wrong in (("missing", names - state.keys()), ("extra", state.keys() - names)):
            if wrong:
                fix = "; set compat_norm_bias: true" if all(name.endswith("norm.bias") for name in wrong) else ""
                if any(name.endswith("expert_bias") for name in wrong):
                    fix = "; set moe_router_bias_update_rate: 0, which keeps it"
                if SCORE_HEAD in wrong:
                    fix = _NO_SCORE if kind == "missing" else _ONLY_SCORES
                problems.append(f"{file.name}, layer {layer}: {kind} {', '.join(sorted(wrong))}{fix}")
        parts[rank] = state
    out: dict[str, Tensor] = {}
    for spec in specs:
        if any(spec.name not in state for state in parts.values()):
            continue
        tensors = {rank: state[spec.name] for rank, state in parts.items()}
        wrong_shape = next((t for t in tensors.values() if not _fits(t, spec, source.tensor_size)), None)
        if wrong_shape is not None:
            mismatches.append(f"layer {layer}: {_shape_problem(spec, wrong_shape, source.tensor_size, args)}")
            continue
        out[spec.name] = _local_part(spec, tensors, same_cut, tensor_rank, tensor_size)
    return out


def _fits(tensor: Tensor, spec: ParamSpec, tensor_size: int) -> bool:
    divides = all(n % tensor_size == 0 for n in spec.blocks) if spec.axis is not None else True
    return divides and tuple(tensor.shape) == spec.local_shape(tensor_size)


def _local_part(
    spec: ParamSpec, parts: Mapping[int, Tensor], same_cut: bool, tensor_rank: int, tensor_size: int
) -> Tensor:
    if spec.sum_over_tensor:
        # In float64 the sum is exact, so that what `local_layer_state` divided comes back bit for bit.
        total = torch.stack([part.double() for part in parts.values()]).sum(0)
        return total.to(next(iter(parts.values())).dtype)
    if same_cut:
        return parts[tensor_rank]
    if spec.axis is None:
        return parts[0]
    return shard(unshard([parts[rank] for rank in sorted(parts)], spec), spec, tensor_rank, tensor_size)


def _shape_problem(spec: ParamSpec, tensor: Tensor, tensor_size: int, args: NeoXArgs) -> str:
    """One line: the tensor, both shapes of one tensor rank, and the key that is most likely wrong."""
    got, want = tuple(tensor.shape), spec.local_shape(tensor_size)
    at = f" (tensor rank of {tensor_size})" if tensor_size > 1 else ""
    text = f"{spec.name}: shape {got} in the file, {want} in the model{at}"
    if len(got) != len(want):
        return text
    if got == spec.shape:
        return f"{text}; the file holds the whole tensor in each tensor rank: convert it again for one rank"
    whole = [n * tensor_size if i == spec.axis else n for i, n in enumerate(got)]
    differs = [i for i, (a, b) in enumerate(zip(whole, spec.shape, strict=True)) if a != b]
    hidden = [whole[i] for i in differs if spec.shape[i] == args.hidden_size]
    if differs == [0] and spec.name in ("word_embeddings.weight", "final_linear.weight"):
        return f"{text}; the vocabulary is padded differently: set padded_vocab_size: {whole[0]}"
    if differs == [0] and spec.name == "position_embeddings.weight":
        return f"{text}; the checkpoint has max_position_embeddings: {whole[0]}"
    if hidden:
        return f"{text}; the checkpoint has hidden_size: {hidden[0]}"
    if "linear" in spec.name:
        return f"{text}; check intermediate_size, activation and compat_ffn_width"
    if "query_key_value" in spec.name:
        return f"{text}; check num_attention_heads and num_kv_heads"
    return text


def local_layer_state(
    layer: int,
    tensors: Mapping[str, Tensor],
    args: NeoXArgs,
    *,
    tensor_rank: int,
    tensor_size: int,
    naming: str | None = None,
    copy: bool = True,
    params: Mapping[int, Sequence[ParamSpec]] | None = None,
) -> dict[str, Tensor]:
    """The content of this tensor rank's file of one layer, by the names of `to_file_names`.

    tensors: this rank's parameters by our names. The result is on the CPU, each tensor contiguous and with
    its own storage. copy: false for tensors that are so already, and may be kept. params: as of
    `load_weights`.
    A bias that is a sum over ranks is divided by tensor_size; the last rank writes the rest, so that the sum
    is exact where the division is not. Raises CheckpointError when `tensors` are not exactly the layer's
    parameters.
    """
    specs = {spec.name: spec for spec in (layer_params(args) if params is None else params).get(layer, ())}
    if specs.keys() != tensors.keys():
        raise CheckpointError(
            f"layer {layer}: holds {', '.join(sorted(tensors)) or 'nothing'}; "
            f"the weight map says {', '.join(sorted(specs)) or 'nothing'}"
        )
    state: dict[str, Tensor] = {}
    for name, spec in specs.items():
        tensor = tensors[name].detach()
        if spec.sum_over_tensor and tensor_size > 1:
            share = tensor / tensor_size
            rest = tensor - share.double() * (tensor_size - 1)
            tensor = rest.to(tensor.dtype) if tensor_rank == tensor_size - 1 else share
        state[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format) if copy else tensor
    return to_file_names(layer, state, args, naming)


def save_layer(
    folder: Path,
    layer: int,
    whole: Mapping[str, Tensor],
    args: NeoXArgs,
    naming: str | None = None,
    to_disk: Callable[[Path], None] = sync,
) -> list[FileRecord]:
    """Split the whole tensors of a layer over the tensor ranks of `args` and write the layer file of each
    rank.

    naming: of `WEIGHT_NAMINGS`, as of `to_file_names`. to_disk: as of `save_tensors`. Returns a record of
    each file.
    """
    records, specs = [], layer_params(args)[layer]
    params = {layer: specs}
    for rank in range(args.tp):
        local = {spec.name: _with_own_storage(shard(whole[spec.name], spec, rank, args.tp)) for spec in specs}
        state = local_layer_state(
            layer, local, args, tensor_rank=rank, tensor_size=args.tp, naming=naming, copy=False, params=params
        )
        records.append(save_tensors(state, folder / layout.layer_file(layer, rank), to_disk=to_disk))
    return records


def _with_own_storage(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it is a view of more: torch.save writes all that a view is of."""
    own = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if own else tensor.clone(memory_format=torch.contiguous_format)


def gather_layers(path: Path, tensor_rank: int) -> dict[str, Tensor]:
    """All tensors in the layer files of one tensor rank under GPT-NeoX's names without a pipeline:
    `sequential.N.name`."""
    return {
        f"sequential.{layer}.{name}": value
        for (layer, rank), file in sorted(layout.layer_files(path).items())
        if rank == tensor_rank
        for name, value in load_tensors(file).items()
    }
