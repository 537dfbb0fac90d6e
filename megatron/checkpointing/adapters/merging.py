"""Checkpoints made of adapters: weights that have taken them in, and adapters alone of a folder of peft's."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.adapters.base import BaseWeights
from megatron.checkpointing.adapters.peft_folder import PeftFolder
from megatron.checkpointing.adapters.sources import AdapterSource, merged_reader
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families import with_vocab_size
from megatron.checkpointing.huggingface.carried_tensors import CARRIED, carried_writer
from megatron.checkpointing.huggingface.companion_files import HF_SUBFOLDER, is_of_tokenizer, read_companion_files
from megatron.checkpointing.huggingface.logit_check import our_logits
from megatron.checkpointing.huggingface.model_files import CONFIG
from megatron.checkpointing.manifest import Manifest, ParallelLayout, model_keys, read_manifest
from megatron.checkpointing.publish import new_checkpoint, publish
from megatron.checkpointing.resharding import PRECISIONS, bare_state, write_model_files
from megatron.checkpointing.tensor_files import FileRecord, save_tensors, write_bytes
from megatron.checkpointing.weights import local_layer_state, save_layer
from megatron.model.weight_map import adapter_params, layer_params
from megatron.neox_arguments import NeoXArgs

# The largest difference of fp32 logits, in proportion to the largest logit: rounding in another order.
BOUND = 1e-5
_ROWS, _LENGTH = 2, 48
LayerProgress = Callable[[Iterable[int], int], Iterable[int]]
_FREE = ("scalenorm_epsilon", "opt_pos_emb_offset", "rpe_max_distance")


@dataclass(frozen=True)
class MergeComparison:
    """Logits with adapters beside the weights, and of weights that have taken them in. name: of the adapters.
    difference: the largest absolute one of fp32 logits; largest: the largest absolute logit; stored: the
    difference once merged weights are rounded to the precision in which they are stored, None where that is
    fp32."""

    name: str
    difference: float
    largest: float
    stored: float | None = None

    @property
    def bound(self) -> float:
        return BOUND * max(1.0, self.largest)

    def __str__(self) -> str:
        rounded = f"; {self.stored:.2e} as stored" if self.stored is not None else ""
        return (
            f"{self.name}: largest logit difference of merged to unmerged {self.difference:.2e} (bound "
            f"{self.bound:.1e}, largest logit {self.largest:.2f}, {_ROWS} x {_LENGTH} tokens at most, fp32){rounded}"
        )


def some_tokens(args: NeoXArgs, vocab_size: int | None = None) -> Tensor:
    """The tokens of comparisons, `[batch, seq]`."""
    length, most = min(_LENGTH, args.max_position_embeddings), vocab_size or args.padded_vocab_size
    assert most is not None
    return torch.randint(0, most, (_ROWS, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def unmerged_logits(base: BaseWeights, source: AdapterSource, tokens: Tensor) -> Tensor:
    """The logits of a model with its adapters beside the weights, `[batch, seq, padded vocabulary]` fp32."""
    return our_logits(source.args, lambda layer: {**base.read(layer), **source.read(layer)}, tokens)


@torch.no_grad()
def compare_merged(base: BaseWeights, source: AdapterSource) -> MergeComparison:
    """Compare logits before and after merging one set of adapters. Raises CheckpointError when they differ by
    more than the bound."""
    args, tokens = source.args.replace(lora=None), some_tokens(source.args)
    before = unmerged_logits(base, source, tokens)
    after = our_logits(args, merged_reader(base.read, [(source, 1.0)], torch.float32), tokens)
    difference, largest = (before - after).abs().max().item(), before.abs().max().item()
    stored = None
    if any(value.dtype != torch.float32 for layer in layer_params(args) for value in base.read(layer).values()):
        rounded = our_logits(args, merged_reader(base.read, [(source, 1.0)]), tokens)
        stored = (before - rounded).abs().max().item()
    comparison = MergeComparison(str(source.path), difference, largest, stored)
    if not difference <= comparison.bound:  # NaN too
        raise CheckpointError(f"merging is refused: {comparison}")
    return comparison


def write_merged(
    base: BaseWeights,
    adapters: Sequence[tuple[AdapterSource, float]],
    save: str | Path,
    *,
    each: LayerProgress = lambda layers, count: layers,
) -> tuple[Path, list[MergeComparison]]:
    """Write weights that have taken adapters in, each with its factor, to `<save>/global_stepN`; N is the
    first one's. Returns it and the comparison of logits for each.

    A run starts from it at iteration 0, as from an import; tokenizer and companion files come along. One
    layer is in memory at a time; nothing is visible until it is whole. Raises CheckpointError.
    """
    save, first = Path(save), adapters[0][0]
    base.verify()
    for source, _ in adapters:
        source.verify()
    args = first.args.replace(lora=None)
    comparisons = [compare_merged(base, source) for source, _ in adapters]
    read, specs = merged_reader(base.read, adapters), layer_params(args)
    made = ", ".join(f"{factor:g} x {source.path}" for source, factor in adapters)

    def write(folder: Path) -> tuple[list[FileRecord], set[torch.dtype]]:
        records, kinds = list[FileRecord](), set[torch.dtype]()
        for layer in each(sorted(specs), len(specs)):
            whole = read(layer)
            kinds |= {value.dtype for value in whole.values()}
            records += save_layer(folder, layer, whole, args)
        return records, kinds

    given = _given(base, first)
    given.pop("lora", None)
    path = _publish(save, first, base, args, given, f"merged: {made}", write, None)
    return path, comparisons


def write_adapters(
    base: BaseWeights, source: AdapterSource, save: str | Path, *, each: LayerProgress = lambda layers, count: layers
) -> Path:
    """Write adapters alone to `<save>/global_step0`, as a run with `lora` loads them: the manifest says where
    the weights below are. Raises CheckpointError."""
    base.verify()
    args, params = source.args, adapter_params(source.args)

    def write(folder: Path) -> tuple[list[FileRecord], set[torch.dtype]]:
        records, kinds = list[FileRecord](), set[torch.dtype]()
        for layer in each(sorted(params), len(params)):
            whole = source.read(layer)
            kinds |= {value.dtype for value in whole.values()}
            state = local_layer_state(layer, whole, args, tensor_rank=0, tensor_size=1, params=params)
            records.append(save_tensors(state, folder / layout.layer_file(layer, 0)))
        return records, kinds

    assert args.lora is not None
    section = {key: list(v) if isinstance(v, tuple) else v for key, v in args.lora.items() if v is not None}
    given = {**_given(base, source), "lora": section, **({"score_head": True} if args.score_head else {})}
    return _publish(Path(save), source, base, args, given, f"adapters of {source.path}", write, base.record())


def _given(base: BaseWeights, source: AdapterSource) -> dict[str, Any]:
    """The keys that the new checkpoint keeps as its configuration."""
    manifest = source.manifest or (None if base.is_hf else read_manifest(base.path))
    if manifest is not None:
        given = dict(manifest.config)
    else:
        given = json.loads(source.args.replace(lora=None).to_json())["given"]
    sizes = {"model_parallel_size": 1, "pipe_parallel_size": 1}
    return {**given, **sizes, "padded_vocab_size": source.args.padded_vocab_size}


def _publish(
    save: Path,
    source: AdapterSource,
    base: BaseWeights,
    args: NeoXArgs,
    given: dict[str, Any],
    run_id: str,
    write: Callable[[Path], tuple[list[FileRecord], set[torch.dtype]]],
    below: Mapping[str, Any] | None,
) -> Path:
    iteration = source.iteration
    final = save / layout.step_tag(iteration)
    if final.exists():
        raise CheckpointError(f"{final}: is there already; remove it, or choose another folder")
    size = sum(
        file.stat().st_size for file in (base.path if below is None else source.path).iterdir() if file.is_file()
    )
    with new_checkpoint(save, iteration, size) as temporary:
        records, kinds = write(temporary)
        records += write_model_files(temporary, [bare_state(args, iteration)], sequential=False)
        for name, content in _carried(base, source).items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            records.append(write_bytes(content, temporary / name, name))
        write_carried = carried_writer(base.path if base.is_hf else base.path / HF_SUBFOLDER, base.is_hf)
        if write_carried is not None:
            records.append(write_carried(temporary / HF_SUBFOLDER / CARRIED, f"{HF_SUBFOLDER}/{CARRIED}"))
        precision = PRECISIONS[next(iter(kinds))] if len(kinds) == 1 else "fp32"
        for key in ("fp16", "bf16"):
            given.pop(key, None)
        given["precision"] = {"bf16": "bfloat16"}.get(precision, precision)
        known = source.manifest or (None if base.is_hf else read_manifest(base.path))
        keys = set(model_keys(args)) - set(_FREE) if known is None or not known.model else {*known.model, "lora"}
        manifest = Manifest(
            run_id=run_id, iteration=iteration, consumed_samples=0, seed=0, data={}, optimizer=False,
            model={key: value for key, value in model_keys(args).items() if key in keys}, base=below,
            layout=ParallelLayout(1, 1, 1, 0, precision, 1), versions={"torch": version("torch")},
            tokenizer=None if known is None else known.tokenizer, config=given,
            created=datetime.now(UTC).isoformat(timespec="seconds"), files={of.name: of for of in records},
        )  # fmt: skip
        text = f"# {run_id}\n{yaml.safe_dump(given, sort_keys=False)}"
        return publish(temporary, save, iteration, manifest, {"adapter.yml": text})


def _carried(base: BaseWeights, source: AdapterSource) -> dict[str, bytes]:
    """Files of the tokenizer and of the imported model that go along, by their names in a checkpoint; those
    of the adapters win, whose tokenizer may have more tokens."""
    below = read_companion_files(base.path if base.is_hf else base.path / HF_SUBFOLDER)
    own = source.companions()
    if source.manifest is None:  # README.md of a folder of peft's is of the adapter
        own = {name: content for name, content in own.items() if is_of_tokenizer(name)}
        own |= _resized(below, PeftFolder(source.path).vocab_size)
    if any(map(is_of_tokenizer, own)):
        below = {name: content for name, content in below.items() if not is_of_tokenizer(name)}
    carried = {f"{HF_SUBFOLDER}/{name}": content for name, content in {**below, **own}.items()}
    for folder in (base.path, source.path) if source.manifest is not None else (base.path,):
        files = (file for file in (folder / "tokenizer").rglob("*") if file.is_file())
        carried |= {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
    return carried


def _resized(files: Mapping[str, bytes], rows: int | None) -> dict[str, bytes]:
    """config.json of the model below, by its name, with the rows of vocabulary that adapters were trained
    with; {} without one."""
    if rows is None or CONFIG not in files:
        return {}
    config = with_vocab_size(json.loads(files[CONFIG]), rows)
    return {CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
