"""Imports a HuggingFace model: writes it as a NeoX checkpoint, or loads it at the start of a run.

Tensors are streamed.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.canonical_config import canonical_config
from megatron.checkpointing.families.convert import check_hf_tensors, from_hf
from megatron.checkpointing.huggingface.carried_tensors import CARRIED, write_carried
from megatron.checkpointing.huggingface.companion_files import (
    CHAT_TEMPLATE,
    GENERATION,
    HF_SUBFOLDER,
    check_tokens,
    is_of_tokenizer,
    read_companion_files,
    write_companion_files,
)
from megatron.checkpointing.huggingface.exporting import LayerProgress, check_space, no_progress
from megatron.checkpointing.huggingface.folder import HFFolder
from megatron.checkpointing.huggingface.logit_check import LogitComparison, compare_logits, plain_args
from megatron.checkpointing.huggingface.weight_writer import weight_bytes
from megatron.checkpointing.manifest import ParallelLayout, model_keys, read_manifest, untrained_manifest
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.checkpointing.publish import new_checkpoint, publish
from megatron.checkpointing.resharding import PRECISIONS, only_dtype, write_bare_files
from megatron.checkpointing.tensor_files import BackgroundCalls, BackgroundSync, FileRecord
from megatron.checkpointing.weights import load_weights, local_layer_state, save_layer
from megatron.model.weight_map import layer_params, may_be_wide
from megatron.mpu import ParamSpec, shard
from megatron.neox_arguments import ConfigError, ModelArgs, NeoXArgs
from megatron.tokenizer import padded_vocab_size

_RECORD = 500  # bytes that torch.save adds to each tensor, approximately
_ROWS_MULTIPLE = 128  # the default of make_vocab_size_divisible_by
_BIASES = "moe_router_bias_update_rate"
# Keys that no HuggingFace model determines. Manifests of imports leave them out, so that runs may set them.
FREE = ("scalenorm_epsilon", "opt_pos_emb_offset", "rpe_max_distance")
# te_layernorm_mlp replaces GELU's erf by tanh, and a norm's epsilon by 1e-5 or 1e-8.
_FREE_UNDER_TE = (*FREE, "te_layernorm_mlp", "bias_gelu_fusion")

TOKENIZER_JSON = "tokenizer/tokenizer.json"  # path inside `save`

LoadLayers = Callable[..., dict[int, dict[str, Tensor]]]


def import_hf(
    folder: HFFolder,
    save: str | Path,
    *,
    iteration: int = 0,
    tensor: int = 1,
    pipe: int = 1,
    naming: str | None = None,
    save_tokenizer: bool = False,
    chat_template: str | Path | None = None,
    progress: LayerProgress = no_progress,
) -> tuple[Path, LogitComparison]:
    """Imports a HuggingFace folder as `<save>/global_stepN`; returns (this path, comparison of logits).

    iteration: N. tensor: tensor-parallel size.
    pipe: number of pipeline stages; 0: write GPT-NeoX's files for runs without a pipeline (mp_rank).
    naming: names of the weights in the files, a key of WEIGHT_NAMINGS; None: GPT-NeoX's current names.
    save_tokenizer: also write the tokenizer's files to `<save>/tokenizer`.
    chat_template: a file that replaces the folder's template, or adds one to a base model.
    progress: wraps the iteration over layers, for a progress bar.

    The vocabulary is padded to a multiple of 128 that the tensor ranks divide. In the checkpoint,
    `configs/hf_model.yml` is the model's configuration, and `huggingface/` has the other files of the folder.
    A layer is read while the previous one is written; no others are in memory. Nothing is visible until the
    checkpoint is complete. Raises CheckpointError."""
    save = Path(save)
    keys, args, dtype = _prepare(folder, tensor, pipe)
    tensors = _converted(folder, keys["padded_vocab_size"])[1]
    _check_target(save / layout.step_tag(iteration))
    specs = layer_params(args)
    companions = _companion_files(folder, chat_template)
    if save_tokenizer and "tokenizer.json" not in companions:
        raise CheckpointError(f"{folder.origin}: has no tokenizer.json that could be saved; leave --save-tokenizer out")
    size = weight_bytes(folder.shapes.values(), dtype) * (2 if pipe == 0 else 1)
    size += weight_bytes(folder.carried.values(), dtype)
    with new_checkpoint(save, iteration, size, check_space) as temporary:
        records: list[FileRecord] = []
        layers, cpu_args = _group_by_layer(tensors, sorted(specs)), plain_args(args)

        def write(layer: int, layer_tensors: dict[str, Tensor]) -> None:
            records.extend(save_layer(temporary, layer, layer_tensors, args, naming, to_disk))
            layer_tensors.clear()

        with BackgroundSync() as to_disk, BackgroundCalls() as writer:
            for layer, layer_tensors in zip(progress(sorted(specs), len(specs)), layers, strict=True):
                writer(partial(write, layer, layer_tensors))

        written = OpenCheckpoint(temporary)  # its manifest is written last

        def weights(layer: int) -> Mapping[str, Tensor]:
            return load_weights(written, cpu_args, layers=[layer], tensor_rank=0, tensor_size=1, copy=False)[layer]

        parity = compare_logits(folder, args, weights, folder.vocab_size)
        records = records if pipe else []
        records += write_bare_files(temporary, args, iteration, sequential=pipe == 0)
        records += write_companion_files(companions, temporary / HF_SUBFOLDER, f"{HF_SUBFOLDER}/")
        if folder.carried:
            records.append(write_carried(folder, temporary / HF_SUBFOLDER / CARRIED, f"{HF_SUBFOLDER}/{CARRIED}"))
        config = {**keys, "precision": {"bf16": "bfloat16"}.get(PRECISIONS[dtype], PRECISIONS[dtype])}
        if save_tokenizer:
            config |= {"tokenizer_type": "HFTokenizer", "vocab_file": str((save / TOKENIZER_JSON).resolve())}
        free, source = _FREE_UNDER_TE if naming == "te" else FREE, Path(folder.origin)
        model = {key: value for key, value in model_keys(args).items() if key not in free}
        run_id = f"huggingface {source.resolve() if source.exists() else source}"
        parallel = ParallelLayout.from_args(args, PRECISIONS[dtype])
        manifest = untrained_manifest(run_id, parallel, model, config, records, iteration=iteration)
        text = f"# {source.name}, of HuggingFace: {parity}\n{yaml.safe_dump(config, sort_keys=False)}"
        path = publish(temporary, save, iteration, manifest, {"hf_model.yml": text})
        if save_tokenizer:
            tokenizer_files = {
                name: content for name, content in companions.items() if is_of_tokenizer(name) or name == GENERATION
            }
            write_companion_files(tokenizer_files, (save / TOKENIZER_JSON).parent)
        return path, parity


def _group_by_layer(tensors: Iterator[tuple[int, str, Tensor]], layers: Iterable[int]) -> Iterator[dict[str, Tensor]]:
    """Yields {name: tensor} for each of `layers`; {} for a layer without parameters.

    tensors: (NeoX layer index, NeoX name, tensor), in the order of `layers`."""
    following = next(tensors, None)
    for layer in layers:
        layer_tensors = {}
        while following is not None and following[0] == layer:
            layer_tensors[following[1]] = following[2]
            following = next(tensors, None)
        yield layer_tensors


def import_plan(
    folder: HFFolder,
    *,
    iteration: int = 0,
    tensor: int = 1,
    pipe: int = 1,
    naming: str | None = None,
    chat_template: str | Path | None = None,
) -> dict[str, int]:
    """Returns {file path: approximate size in bytes} of what `import_hf` would write; no weight is read.

    Configuration files (some kilobytes) are left out. Arguments and errors are those of `import_hf`."""
    _, args, dtype = _prepare(folder, tensor, pipe)
    layers: dict[str, int] = {}
    ranks = dict.fromkeys(range(tensor), 0)
    params = layer_params(args)
    for layer, specs in sorted(params.items()):
        full = {spec.name: torch.empty(spec.shape, dtype=dtype, device="meta") for spec in specs}
        for rank in ranks:
            local = {spec.name: shard(full[spec.name], spec, rank, tensor) for spec in specs}
            state = local_layer_state(
                layer, local, args, tensor_rank=rank, tensor_size=tensor, naming=naming, copy=False, params=params
            )
            size = sum(value.nbytes + _RECORD for value in state.values())
            layers[layout.layer_file(layer, rank)] = size
            ranks[rank] += size
    if pipe == 0:
        files = {layout.model_file(rank): size for rank, size in ranks.items()}
    else:
        files = layers | {layout.model_file(rank): _RECORD for rank in range(pipe * tensor)}
    companions = _companion_files(folder, chat_template)
    files |= {f"{HF_SUBFOLDER}/{name}": len(content) for name, content in companions.items()}
    if folder.carried:
        files[f"{HF_SUBFOLDER}/{CARRIED}"] = weight_bytes(folder.carried.values(), dtype)
    return {f"{layout.step_tag(iteration)}/{name}": size for name, size in files.items()}


def _prepare(folder: HFFolder, tensor: int, pipe: int) -> tuple[dict[str, Any], NeoXArgs, torch.dtype]:
    """Returns (configuration keys of model and layout, `NeoXArgs` made of these keys, dtype of weights).

    tensor, pipe: tensor- and pipeline-parallel size. No weight is read. Raises CheckpointError for a folder
        that cannot be imported with this layout."""
    rows = padded_vocab_size(folder.vocab_size, _ROWS_MULTIPLE, tensor)
    keys = _converted(folder, rows)[0]
    check_hf_tensors(folder.config, keys, folder.shapes, folder.origin)
    required = _required_tensors(folder, keys)
    dtypes = {dtype for name, dtype in folder.dtypes.items() if name in required}
    dtype = only_dtype(folder.origin, dtypes, "; choose one with --precision")
    keys |= {"model_parallel_size": tensor, "pipe_parallel_size": pipe}
    try:
        return keys, NeoXArgs.from_dict(keys), dtype
    except ConfigError as problem:
        raise CheckpointError(f"{folder.origin}: {problem}") from problem


def _converted(
    folder: HFFolder,
    rows: int | None,
    get: Callable[[str], Tensor] | None = None,
    layers: Collection[int] | None = None,
) -> tuple[dict[str, Any], Iterator[tuple[int, str, Tensor]]]:
    """Returns `from_hf` of a folder, with its blocks for multi-token prediction. rows: padded vocabulary."""
    read = folder.get if get is None else get
    return from_hf(folder.config, read, padded_vocab_size=rows, layers=layers, mtp_layers=folder.mtp_layers)


def _companion_files(folder: HFFolder, chat_template: str | Path | None) -> dict[str, bytes]:
    """Returns content of the folder's files to keep (config.json, tokenizer, README.md), by name.

    chat_template: path of a file that replaces the folder's template. Raises CheckpointError, also if the
        tokenizer has more tokens than the embedding has rows."""
    files = read_companion_files(folder.path)
    check_tokens(files, folder.vocab_size, folder.origin)
    if chat_template is not None:
        try:
            files[CHAT_TEMPLATE] = Path(chat_template).read_bytes()
        except OSError as problem:
            raise CheckpointError(f"--chat-template {chat_template}: cannot be read ({problem.strerror})") from problem
    return files


def _check_target(final: Path) -> None:
    """Raise CheckpointError if the import would replace a run's checkpoint; it may replace an import."""
    if final.exists():
        manifest = read_manifest(final)
        if manifest is None or manifest.data or manifest.optimizer:
            raise CheckpointError(
                f"{final}: already exists, as a checkpoint of a run; choose another folder or --iteration"
            )


def _required_tensors(folder: HFFolder, keys: Mapping[str, Any]) -> set[str]:
    """Returns the HuggingFace names of tensors that must all have one dtype.

    These are all tensors of the model, except those that may be fp32 in a 16-bit model. No tensor is read."""
    required: set[str] = set()
    param_sources: set[str] = set()  # HuggingFace tensors of one NeoX parameter

    def get(name: str) -> Tensor:
        param_sources.add(name)
        return torch.empty(folder.shapes[name], device="meta")

    for _, name, _ in _converted(folder, keys["padded_vocab_size"], get)[1]:
        required |= set() if may_be_wide(name) else param_sources
        param_sources.clear()
    return required


# -- as the start of a run -----------------------------------------------------------------------------------


def load_hf_weights(
    path: str | Path,
    args: NeoXArgs,
    *,
    layers: Iterable[int],
    tensor_rank: int,
    tensor_size: int,
    new_head: bool = False,
) -> dict[int, dict[str, Tensor]]:
    """Loads one tensor rank's shards of `layers` from a HuggingFace folder.

    Returns {NeoX layer index: {NeoX name: tensor}}. args: the run's configuration. Vocabulary rows that the
    model lacks are the mean of its rows. new_head: leave out the folder's output layer. Raises
    CheckpointError with the keys of `args` that differ from the folder's model, and their right values."""
    return hf_loader(path, args, new_head=new_head)(layers=layers, tensor_rank=tensor_rank, tensor_size=tensor_size)


def hf_loader(path: str | Path, args: NeoXArgs, *, new_head: bool = False) -> LoadLayers:
    """Returns a function that loads shards from one HuggingFace folder, as `load_hf_weights` does.

    It takes layers, tensor_rank and tensor_size. Its first call checks that `args` fit the folder's model.
    new_head: leave out the folder's output layer."""
    opened = cache(partial(_open_as, path, args, new_head))

    def load(*, layers: Iterable[int], tensor_rank: int, tensor_size: int) -> dict[int, dict[str, Tensor]]:
        (folder, specs), requested = opened(), set(layers)
        loaded: dict[int, dict[str, Tensor]] = {layer: {} for layer in requested}
        tensors = _converted(folder, args.padded_vocab_size, layers=requested)[1]
        for layer, name, value in tensors:
            local = shard(value, specs[layer][name], tensor_rank, tensor_size)
            loaded[layer][name] = local.clone(memory_format=torch.contiguous_format)
        for layer, params in loaded.items():  # expert biases that the HuggingFace model lacks start at 0
            missing = [spec for name, spec in specs.get(layer, {}).items() if not spec.trained and name not in params]
            params |= {spec.name: torch.zeros(spec.local_shape(tensor_size)) for spec in missing}
        return loaded

    return load


def _open_as(
    path: str | Path, args: NeoXArgs, new_head: bool
) -> tuple[HFFolder, Mapping[int, Mapping[str, ParamSpec]]]:
    """Returns (the opened folder, {NeoX layer index: {NeoX name: spec of the parameter}}).

    new_head: ignore the output layer. Raises CheckpointError if the folder's model does not fit `args`."""
    folder, rows = HFFolder(path, mtp_layers=args.mtp_num_layers or 0), args.padded_vocab_size
    assert rows is not None
    if rows < folder.vocab_size:
        raise CheckpointError(
            f"{path}: has {folder.vocab_size} vocabulary rows, but padded_vocab_size is {rows}; leave the key out, or "
            f"set at least {folder.vocab_size}"
        )
    keys = _converted(folder, rows)[0]
    _check_same_model(NeoXArgs.from_dict(keys, "config.json"), args, str(path), new_head)
    check_hf_tensors(folder.config, keys, folder.shapes, str(path))
    return folder, {layer: {spec.name: spec for spec in specs} for layer, specs in layer_params(args).items()}


def _check_same_model(hf_args: NeoXArgs, run_args: NeoXArgs, source: str, new_head: bool) -> None:
    """Raise CheckpointError with the keys in which `run_args` differs from the HuggingFace model, `hf_args`.

    source: the model's name, for the error. new_head: ignore the output layer."""
    expected, now = canonical_config(hf_args), canonical_config(plain_args(run_args))
    scaled = hf_args.rope_scaling is not None and hf_args.rope_scaling["rope_type"] == "dynamic"
    # The run may choose another maximum length.
    if hf_args.pos_emb in ("rotary", "none") and hf_args.attends and not scaled:
        expected["max_position_embeddings"] = now.get("max_position_embeddings")
    if now.get(_BIASES) and expected.get(_BIASES) is False:  # the biases start at 0
        expected[_BIASES] = True
    if new_head:
        head_keys = ("no_weight_tying", "score_head", "final_logit_softcapping", "logit_scale")
        expected |= {key: now[key] for key in head_keys}
    wrong = [key for key in {**expected, **now} if expected.get(key) != now.get(key)]
    if wrong:
        differences = [
            f"{key}: {_in_short(expected.get(key))} in the model, {_in_short(now.get(key))} in this run"
            for key in wrong
        ]
        raise CheckpointError(
            f"{source}: the run's configuration does not fit this model "
            "(tools/ckpts/convert_hf_to_neox.py writes one that does):\n  " + "\n  ".join(differences)
        )


def _in_short(value: Any) -> str:
    """Converts a value to text; a list of equal items is shown as one item."""
    is_constant = isinstance(value, (list, tuple)) and len(value) > 1 and all(item == value[0] for item in value)
    return f"{json.dumps(value[0])} (all layers)" if is_constant else json.dumps(value)


def vocab_size_from_hf(path: str | Path, args: ModelArgs, tokens: int) -> tuple[int, str]:
    """Returns (padded_vocab_size, a log line about it) for a run that starts from a HuggingFace folder.

    tokens: number of tokens of the run's tokenizer."""
    folder = HFFolder(path, mtp_layers=args.mtp_num_layers or 0)
    vocab = folder.vocab_size
    rows = args.padded_vocab_size or padded_vocab_size(max(vocab, tokens), args.make_vocab_size_divisible_by, args.tp)
    added = max(0, tokens - vocab)
    resized = (
        f"; {added} tokens are new: their rows of the embedding and the head start as the mean of the others"
        if added
        else ""
    )
    packed = "".join(f"; {note}" for note in (folder.quantised, folder.untied, folder.left_out) if note)
    text = f"{path}: {vocab} vocabulary rows, padded to {rows}; the tokenizer has {tokens} tokens{resized}{packed}"
    return rows, text
