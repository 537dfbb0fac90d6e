"""A HuggingFace model as a checkpoint of ours, and as the start of a run: streamed, whole or not at all."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families import canonical_config, check_hf_tensors, from_hf
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
from megatron.checkpointing.huggingface.folder import HFFolder, weight_bytes
from megatron.checkpointing.huggingface.logit_check import LogitComparison, compare_logits, plain_args
from megatron.checkpointing.manifest import Manifest, ParallelLayout, model_keys, read_manifest
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.checkpointing.publish import new_checkpoint, publish
from megatron.checkpointing.resharding import PRECISIONS, bare_state, write_model_files
from megatron.checkpointing.tensor_files import FileRecord, OneBehind, SyncBeside
from megatron.checkpointing.weights import load_weights, local_layer_state, save_layer
from megatron.model.weight_map import layer_params, may_be_wide
from megatron.mpu import ParamSpec, shard
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.tokenizer import padded_vocab_size

_RECORD = 500  # bytes that torch.save writes beside those of a tensor, about
_ROWS_MULTIPLE = 128  # make_vocab_size_divisible_by, unless a run says otherwise
_BIASES = "moe_router_bias_update_rate"
# Of the model's keys in a manifest those that HuggingFace does not fix: a run sets them at will.
_FREE = ("scalenorm_epsilon", "opt_pos_emb_offset", "rpe_max_distance")
# te_layernorm_mlp puts tanh in the place of erf, and 1e-5 or 1e-8 in the place of a norm's epsilon.
_FREE_UNDER_TE = (*_FREE, "te_layernorm_mlp", "bias_gelu_fusion")

TOKENIZER_JSON = "tokenizer/tokenizer.json"  # of `save`

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
    each: LayerProgress = no_progress,
) -> tuple[Path, LogitComparison]:
    """Write `<save>/global_stepN` and let `latest` name it; returns it, and the check against transformers.

    pipe: stages; 0: GPT-NeoX's files without a pipeline, mp_rank alone.
    naming: of WEIGHT_NAMINGS; None: today's.
    save_tokenizer: its files also in `<save>/tokenizer`. chat_template: a file that takes the place of the
    folder's, or gives a base model one. The vocabulary is padded to a multiple of 128 that the ranks divide,
    `configs/hf_model.yml` in the checkpoint is the model's configuration, and the files of the folder go
    along in `huggingface/`. A layer is read while the one before is written; no others are
    in memory. Raises CheckpointError.
    """
    save = Path(save)
    keys, args, dtype = _prepare(folder, tensor, pipe)
    tensors = from_hf(folder.config, folder.get, padded_vocab_size=keys["padded_vocab_size"])[1]
    _check_target(save / layout.step_tag(iteration))
    specs = layer_params(args)
    companions = _companion_files(folder, chat_template)
    if save_tokenizer and "tokenizer.json" not in companions:
        raise CheckpointError(f"{folder.origin}: has no tokenizer.json to save; leave --save-tokenizer out")
    needed = weight_bytes(folder.shapes, dtype) * (2 if pipe == 0 else 1) + weight_bytes(folder.carried, dtype)
    with new_checkpoint(save, iteration, needed, check_space) as temporary:
        records: list[FileRecord] = []
        layers, plain = _by_layer(tensors, sorted(specs)), plain_args(args)

        def write(layer: int, whole: dict[str, Tensor]) -> None:
            records.extend(save_layer(temporary, layer, whole, args, naming, to_disk))
            whole.clear()

        with SyncBeside() as to_disk, OneBehind() as behind:
            for layer, whole in zip(each(sorted(specs), len(specs)), layers, strict=True):
                behind(partial(write, layer, whole))

        made = OpenCheckpoint(temporary)  # its manifest is written last

        def weights(layer: int) -> Mapping[str, Tensor]:
            return load_weights(made, plain, layers=[layer], tensor_rank=0, tensor_size=1, copy=False)[layer]

        parity = compare_logits(folder, args, weights, folder.vocab_size)
        if pipe == 0:
            records = []
        states = [bare_state(args, iteration)] * (max(pipe, 1) * tensor)
        records += write_model_files(temporary, states, sequential=pipe == 0)
        records += write_companion_files(companions, temporary / HF_SUBFOLDER, f"{HF_SUBFOLDER}/")
        if folder.carried:
            records.append(write_carried(folder, temporary / HF_SUBFOLDER / CARRIED, f"{HF_SUBFOLDER}/{CARRIED}"))
        given = {**keys, "precision": {"bf16": "bfloat16"}.get(PRECISIONS[dtype], PRECISIONS[dtype])}
        if save_tokenizer:
            given |= {"tokenizer_type": "HFTokenizer", "vocab_file": str((save / TOKENIZER_JSON).resolve())}
        free, where = _FREE_UNDER_TE if naming == "te" else _FREE, Path(folder.origin)
        model = {key: value for key, value in model_keys(args).items() if key not in free}
        manifest = Manifest(
            run_id=f"huggingface {where.resolve() if where.exists() else where}", iteration=iteration,
            consumed_samples=0, model=model, seed=0, tokenizer=None, data={},
            layout=ParallelLayout(max(pipe, 1), 1, tensor, 0, PRECISIONS[dtype], max(pipe, 1) * tensor),
            versions={"torch": version("torch")}, created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=given, files={record.name: record for record in records}, optimizer=False,
        )  # fmt: skip
        text = f"# {where.name}, of HuggingFace: {parity}\n{yaml.safe_dump(given, sort_keys=False)}"
        path = publish(temporary, save, iteration, manifest, {"hf_model.yml": text})
        if save_tokenizer:
            ours = {
                name: content for name, content in companions.items() if is_of_tokenizer(name) or name == GENERATION
            }
            write_companion_files(ours, (save / TOKENIZER_JSON).parent)
        return path, parity


def _by_layer(tensors: Iterator[tuple[int, str, Tensor]], layers: Iterable[int]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each layer by name, {} of one whose norms have no weights."""
    following = next(tensors, None)
    for layer in layers:
        whole = {}
        while following is not None and following[0] == layer:
            whole[following[1]] = following[2]
            following = next(tensors, None)
        yield whole


def import_plan(
    folder: HFFolder,
    *,
    iteration: int = 0,
    tensor: int = 1,
    pipe: int = 1,
    naming: str | None = None,
    chat_template: str | Path | None = None,
) -> dict[str, int]:
    """The files that `import_hf` would write and about their sizes in bytes; no weight is read, and what says
    how the checkpoint is configured (some kilobytes) is left out. Arguments and errors as there."""
    _, args, dtype = _prepare(folder, tensor, pipe)
    layers: dict[str, int] = {}
    ranks = dict.fromkeys(range(tensor), 0)
    params = layer_params(args)
    for layer, specs in sorted(params.items()):
        whole = {spec.name: torch.empty(spec.shape, dtype=dtype, device="meta") for spec in specs}
        for rank in ranks:
            local = {spec.name: shard(whole[spec.name], spec, rank, tensor) for spec in specs}
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
        files[f"{HF_SUBFOLDER}/{CARRIED}"] = weight_bytes(folder.carried, dtype)
    return {f"{layout.step_tag(iteration)}/{name}": size for name, size in files.items()}


def _prepare(folder: HFFolder, tensor: int, pipe: int) -> tuple[dict[str, Any], NeoXArgs, torch.dtype]:
    """The keys of the model and of the layout, their configuration, and the dtype of the weights. No weight
    is read. Raises CheckpointError for a folder that cannot be imported so."""
    rows = padded_vocab_size(folder.vocab_size, _ROWS_MULTIPLE, tensor)
    keys = from_hf(folder.config, folder.get, padded_vocab_size=rows)[0]
    check_hf_tensors(folder.config, keys, folder.shapes, folder.origin)
    dtype = _only_dtype(folder, keys)
    keys |= {"model_parallel_size": tensor, "pipe_parallel_size": pipe}
    try:
        return keys, NeoXArgs.from_dict(keys), dtype
    except ConfigError as problem:
        raise CheckpointError(f"{folder.origin}: {problem}") from problem


def _companion_files(folder: HFFolder, chat_template: str | Path | None) -> dict[str, bytes]:
    """What goes along with the weights, by name; the file `chat_template` takes the place of the folder's.
    Raises CheckpointError, also where the tokenizer has more tokens than the embedding has rows."""
    files = read_companion_files(folder.path)
    check_tokens(files, folder.vocab_size, folder.origin)
    if chat_template is not None:
        try:
            files[CHAT_TEMPLATE] = Path(chat_template).read_bytes()
        except OSError as problem:
            raise CheckpointError(f"--chat-template {chat_template}: cannot be read ({problem.strerror})") from problem
    return files


def _check_target(final: Path) -> None:
    """A checkpoint of a run is never replaced by an import; an import is."""
    if final.exists():
        manifest = read_manifest(final)
        if manifest is None or manifest.data or manifest.optimizer:
            raise CheckpointError(f"{final}: is there already, and no import; give another folder or --iteration")


def _only_dtype(folder: HFFolder, keys: Mapping[str, Any]) -> torch.dtype:
    asked = _asked(folder, keys)
    dtypes = {dtype for name, dtype in folder.dtypes.items() if name in asked}
    if len(dtypes) != 1 or not dtypes <= PRECISIONS.keys():
        dtype_names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise CheckpointError(
            f"{folder.origin}: its weights are of several or unknown kinds ({dtype_names}); choose one with --precision"
        )
    return next(dtype for dtype in dtypes if dtype is not None)


def _asked(folder: HFFolder, keys: Mapping[str, Any]) -> set[str]:
    """The names of the tensors that the model is made of, but for parameters that may be fp32 beside 16-bit
    weights; no tensor is read."""
    asked: set[str] = set()
    of_one: set[str] = set()  # parameter of ours

    def get(name: str) -> Tensor:
        of_one.add(name)
        return torch.empty(folder.shapes[name], device="meta")

    for _, name, _ in from_hf(folder.config, get, padded_vocab_size=keys["padded_vocab_size"])[1]:
        asked |= set() if may_be_wide(name) else of_one
        of_one.clear()
    return asked


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
    """Load the tensors of `layers` from a HuggingFace folder; arguments and result are those of
    `load_weights`.

    Rows that pad the vocabulary, or that the tokenizer added, are the mean of the others. Raises
    CheckpointError that says what `args` should be.
    """
    return hf_loader(path, args, new_head=new_head)(layers=layers, tensor_rank=tensor_rank, tensor_size=tensor_size)


def hf_loader(path: str | Path, args: NeoXArgs, *, new_head: bool = False) -> LoadLayers:
    """`load_hf_weights` for who asks for one layer after the other: the folder is compared with `args` once,
    at the first call."""
    opened = cache(partial(_open_as, path, args, new_head))

    def load(*, layers: Iterable[int], tensor_rank: int, tensor_size: int) -> dict[int, dict[str, Tensor]]:
        (folder, specs), wanted = opened(), set(layers)
        loaded: dict[int, dict[str, Tensor]] = {layer: {} for layer in wanted}
        tensors = from_hf(folder.config, folder.get, padded_vocab_size=args.padded_vocab_size, layers=wanted)[1]
        for layer, name, value in tensors:
            local = shard(value, specs[layer][name], tensor_rank, tensor_size)
            loaded[layer][name] = local.clone(memory_format=torch.contiguous_format)
        for layer, of in loaded.items():  # a bias of experts that the model did not have was 0 there
            missing = [spec for name, spec in specs.get(layer, {}).items() if not spec.trained and name not in of]
            of |= {spec.name: torch.zeros(spec.local_shape(tensor_size)) for spec in missing}
        return loaded

    return load


def _open_as(
    path: str | Path, args: NeoXArgs, new_head: bool
) -> tuple[HFFolder, Mapping[int, Mapping[str, ParamSpec]]]:
    """A folder, and the parameters of each layer of `args`, whose model it holds; else CheckpointError."""
    folder, rows = HFFolder(path), args.padded_vocab_size
    assert rows is not None
    if rows < folder.vocab_size:
        raise CheckpointError(
            f"{path}: has {folder.vocab_size} rows of vocabulary, padded_vocab_size is {rows}; leave it out, or set at "
            f"least {folder.vocab_size}"
        )
    keys = from_hf(folder.config, folder.get, padded_vocab_size=rows)[0]
    _check_same_model(NeoXArgs.from_dict(keys, "config.json"), args, str(path), new_head)
    check_hf_tensors(folder.config, keys, folder.shapes, str(path))
    return folder, {layer: {spec.name: spec for spec in specs} for layer, specs in layer_params(args).items()}


def _check_same_model(theirs: NeoXArgs, ours: NeoXArgs, where: str, new_head: bool) -> None:
    """Raise CheckpointError with the keys in which the configuration differs from the model's. new_head: but
    for the output layer."""
    wanted, now = canonical_config(theirs), canonical_config(plain_args(ours))
    scaled = theirs.rope_scaling is not None and theirs.rope_scaling["rope_type"] == "dynamic"
    # How long texts may be is the run's choice.
    if theirs.pos_emb in ("rotary", "none") and theirs.attends and not scaled:
        wanted["max_position_embeddings"] = now.get("max_position_embeddings")
    if now.get(_BIASES) and wanted.get(_BIASES) is False:  # they begin at 0
        wanted[_BIASES] = True
    if new_head:
        of_head = ("no_weight_tying", "score_head", "final_logit_softcapping", "logit_scale")
        wanted |= {key: now[key] for key in of_head}
    wrong = [key for key in {**wanted, **now} if wanted.get(key) != now.get(key)]
    if wrong:
        differences = [f"{key}: {_in_short(wanted.get(key))} there, {_in_short(now.get(key))} here" for key in wrong]
        raise CheckpointError(
            f"{where}: not the configuration's model; tools/ckpts/convert_hf_to_neox.py writes one that fits:\n  "
            + "\n  ".join(differences)
        )


def _in_short(value: Any) -> str:
    """A value as text; a list whose items are all equal as one item."""
    alike = isinstance(value, (list, tuple)) and len(value) > 1 and all(item == value[0] for item in value)
    return f"{json.dumps(value[0])} (all layers)" if alike else json.dumps(value)


def vocab_size_from_hf(path: str | Path, args: NeoXArgs, tokens: int) -> tuple[int, str]:
    """padded_vocab_size for a run that starts from a HuggingFace folder, and a log line about it.

    tokens: number of tokens of the run's tokenizer.
    """
    folder = HFFolder(path)
    vocab = folder.vocab_size
    rows = args.padded_vocab_size or padded_vocab_size(max(vocab, tokens), args.make_vocab_size_divisible_by, args.tp)
    added = max(0, tokens - vocab)
    resized = f"; {added} tokens are new to it: rows of the embedding and the head start as the mean" if added else ""
    packed = "".join(f"; {note}" for note in (folder.quantised, folder.untied) if note)
    return (
        rows,
        f"{path}: {vocab} rows of vocabulary, padded to {rows}; the tokenizer has {tokens} tokens{resized}{packed}",
    )
