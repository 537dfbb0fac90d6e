"""Exports a checkpoint, of this program or of GPT-NeoX in any layout, to a HuggingFace folder.

Tensors are streamed and checked. The folder appears only when it is complete.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError, DamagedError, shortened
from megatron.checkpointing.families.convert import (
    hf_config,
    hf_names,
    hf_shapes,
    is_same_model,
    to_hf,
    unchanged_family,
    with_fields,
)
from megatron.checkpointing.families.family import Family
from megatron.checkpointing.families.multimodal import (
    TEXT_TOWERS,
    is_multimodal,
    multimodal_config,
    stored_name,
    text_config,
)
from megatron.checkpointing.families.registry import FAMILIES, family_of
from megatron.checkpointing.huggingface.carried_tensors import carried_tensors
from megatron.checkpointing.huggingface.companion_files import (
    CARD,
    HF_SUBFOLDER,
    companion_files_of,
    write_companion_files,
)
from megatron.checkpointing.huggingface.folder import CONFIG, TEMPLATES, HFFolder, SafetensorsFile, cast_to
from megatron.checkpointing.huggingface.logit_check import LogitComparison, compare_logits, plain_args
from megatron.checkpointing.huggingface.model_card import model_card
from megatron.checkpointing.huggingface.model_files import read_config
from megatron.checkpointing.huggingface.weight_writer import SHARD_BYTES, planned_sizes, weight_bytes, write_weights
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.checkpointing.optimizer_files import OptimizerFiles
from megatron.checkpointing.tensor_files import BackgroundSync, need_free
from megatron.checkpointing.weight_files import describe_checkpoint
from megatron.checkpointing.weights import NO_AVERAGES, load_weights
from megatron.data.files import sync
from megatron.model.weight_map import layer_params
from megatron.neox_arguments import ModelArgs, NeoXArgs

LayerProgress = Callable[[Iterable[int], int], Iterable[int]]
_SPARE = 64 << 20  # for small files, and to leave some space free
# Files that an earlier conversion may have written; a new conversion replaces them.
_MODEL_FILES = re.compile(
    r".*\.(safetensors|json|jinja|txt|md|tiktoken)|[\w.]+\.model(\.v\d+)?|pytorch_model.*\.bin|(LICEN[CS]E|COPYING|NOTICE|.*USE_POLICY).*"
)


def no_progress(layers: Iterable[int], count: int) -> Iterable[int]:
    return layers


@dataclass(frozen=True)
class _Export:
    """Everything that an export writes, except the values of the weights.

    args: the model's configuration, for one process in fp32.
    dtype: of the written weights. wide: dtypes of parameters that differ, by (NeoX layer index, NeoX name).
    vocab: number of vocabulary rows to write.
    family: to write; of a multimodal model, its language model's.
    shapes: of the model's own weights, by HuggingFace name.
    files: content of the other files, by name.
    carried: tensors of the imported model that NeoX models lack, which are copied unchanged; None: there are
        none.
    is_part: the model is the language model of a multimodal model.
    """

    args: NeoXArgs
    dtype: torch.dtype
    wide: Mapping[tuple[int, str], torch.dtype]
    vocab: int
    family: Family
    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, bytes]
    carried: SafetensorsFile | None
    is_part: bool

    @property
    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors of the folder, by name, including those copied unchanged."""
        return {self.name(name): shape for name, shape in self.shapes.items()} | self._carried_shapes

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of all tensors of the folder, by name; tensors copied unchanged keep theirs."""
        dtypes_by_name = {self.name(name): self.dtype for name in self.shapes}
        for place, names in hf_names(self.args, self.wide, family=self.family.model_type).items():
            dtypes_by_name |= {self.name(name): self.wide[place] for name in names}
        return dtypes_by_name | {name: self.carried.get(name).dtype for name in self._carried_shapes if self.carried}

    @property
    def _carried_shapes(self) -> dict[str, tuple[int, ...]]:
        """A block for multi-token prediction that was trained takes the place of the carried one."""
        if self.carried is None:
            return {}
        trained = bool(self.family.prediction_blocks(self.args))
        return {
            name: shape for name, shape in self.carried.shapes.items() if not (trained and self.family.predicts(name))
        }

    def name(self, name: str) -> str:
        """Returns a language model's tensor name as the folder stores it: in a multimodal folder with a
        prefix."""
        return stored_name(name, self.carried.shapes) if self.carried is not None and self.is_part else name

    def with_carried(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields (name in the folder, tensor) of `tensors`, then of the tensors that are copied unchanged."""
        yield from ((self.name(name), tensor) for name, tensor in tensors)
        if self.carried is not None:
            yield from ((name, self.carried.get(name)) for name in self._carried_shapes)


class ExportOptions(TypedDict, total=False):
    """Options of `export_hf` about the files that it writes.

    family: a `model_type`; None: the imported model's (multimodal if it was), else the first that fits.
    averaged: as in `OpenCheckpoint`.
    dtype: of the written weights; None: the checkpoint's.
    tokenizer: false leaves the tokenizer's files out.
    vocab_is_hf: `vocab_file` is a folder or a name on the Hub.
    pad_token_id: replaces the tokenizer's.
    """

    family: str | None
    averaged: bool
    dtype: torch.dtype | None
    tokenizer: bool
    vocab_is_hf: bool
    pad_token_id: int | None


def export_hf(
    source: str | Path,
    args: NeoXArgs,
    output: str | Path,
    *,
    check: bool = True,
    shard_bytes: int = SHARD_BYTES,
    progress: LayerProgress = no_progress,
    notes: Mapping[str, bytes] | None = None,
    **options: Unpack[ExportOptions],
) -> LogitComparison | None:
    """Writes checkpoint `source` as the HuggingFace folder `output`; returns the comparison of logits.

    args: the checkpoint's configuration, from `load_checkpoint_args`.
    check: compare logits with those of transformers before the folder appears; false: returns None.
    shard_bytes: largest size of a weight file.
    progress: wraps the iteration over layers, for a progress bar.
    notes: content of further .json files, by name.
    options: as in `ExportOptions`.

    A tensor is written while the next is read; no others are in memory. Files are checked against the
    manifest before they are used. A folder of an earlier conversion is replaced. After an interruption,
    repeat the call. Raises CheckpointError."""
    source, output = Path(source), Path(output).resolve()
    opened = OpenCheckpoint(source, averaged=options.get("averaged", False))
    layer_names = [file.name for _, file in sorted(layout.layer_files(source).items())]
    opened.verify(set(opened.names).difference(layer_names))
    export = _prepare(source, args, **options)
    with new_folder(output, weight_bytes(export.all_shapes.values(), export.dtype)) as temporary:
        with opened.verifying_ahead(layer_names), BackgroundSync() as to_disk:
            layers = sorted(layer_params(export.args))
            read = read_layers(opened, export.args, progress(layers, len(layers)), export.dtype, export.wide)
            tensors = export.with_carried(
                to_hf(export.args, read, family=export.family.model_type, vocab_size=export.vocab, copy=False)
            )
            write_weights(temporary, export.all_shapes, export.dtypes, tensors, shard_bytes, to_disk=to_disk)
        write_companion_files({**export.files, **(notes or {})}, temporary)

        def weights(layer: int) -> Mapping[str, Tensor]:
            return dict(read_layers(opened, export.args, [layer], export.dtype, export.wide))[layer]

        if not check:
            return None
        return compare_logits(HFFolder(temporary, str(output)), export.args, weights, export.vocab)


def unwritten_blocks(folder: str | Path, args: ModelArgs) -> str | None:
    """Returns a line about blocks for multi-token prediction that an exported folder lacks; None: it has all.

    args: the configuration of what was exported."""
    family = FAMILIES[family_of(text_config(read_config(Path(folder))))]
    if not args.mtp_num_layers or family.prediction_blocks(args):
        return None
    blocks = f"{args.mtp_num_layers} blocks for multi-token prediction (mtp_num_layers)"
    place = "place for one alone" if family.has_mtp_block else "no place for them"
    return f"{folder}: {blocks} are left out: files of {family.model_type} have {place}"


def export_plan(source: str | Path, args: NeoXArgs, **options: Unpack[ExportOptions]) -> dict[str, int]:
    """Returns {file name: size in bytes} of the folder that `export_hf` would write; no weight is read.

    Arguments and errors are those of `export_hf`."""
    export = _prepare(Path(source), args, **options)
    files = {name: len(content) for name, content in export.files.items()}
    return planned_sizes(export.all_shapes, export.dtypes) | files


def _prepare(
    source: Path,
    args: NeoXArgs,
    *,
    family: str | None = None,
    averaged: bool = False,
    dtype: torch.dtype | None = None,
    tokenizer: bool = True,
    vocab_is_hf: bool = False,
    pad_token_id: int | None = None,
) -> _Export:
    """Returns shapes, dtypes and other files of an export, without reading weights.

    Arguments and errors are those of `export_hf`."""
    if args.lora is not None:
        raise CheckpointError(
            f"{source}: holds LoRA adapters and base weights; merge them first (tools/ckpts/adapter.py merge), or "
            "export only the adapters to peft (tools/ckpts/adapter.py export)"
        )
    if averaged and not OptimizerFiles(source).has_averages:
        raise CheckpointError(f"{source}: {NO_AVERAGES}")
    run_args, args = args, plain_args(args)
    dtype, wide = dtypes_to_write(source, dtype)
    extras = companion_files_of(
        source, args, tokenizer=tokenizer, vocab_is_hf=vocab_is_hf, pad_token_id=pad_token_id,
        scores=bool(args.score_head),
    )  # fmt: skip
    assert args.padded_vocab_size is not None
    vocab = extras.vocab_size or args.padded_vocab_size
    if extras.tokens is not None and extras.tokens > args.padded_vocab_size:
        raise CheckpointError(
            f"{source}: its tokenizer has {extras.tokens} tokens, but its embedding has only "
            f"{args.padded_vocab_size} rows; set vocab_file to the tokenizer that the model was trained with"
        )
    vocab = max(vocab, extras.tokens or 0)
    unchanged = unchanged_family(args, extras.config)
    if family in TEXT_TOWERS:
        if unchanged is None or extras.full_config.get("model_type") != family:
            raise CheckpointError(
                f"{source}: was not imported from a {family} model, so it has no vision part; choose another family"
            )
        family = None
    is_part = is_multimodal(extras.full_config)
    is_unchanged = unchanged is not None and (family is None or (family == unchanged and not is_part))
    carried = carried_tensors(source / HF_SUBFOLDER) if is_unchanged else None
    family = family or unchanged
    shapes = hf_shapes(args, family=family, vocab_size=vocab)
    fields = hf_config(args, family=family, vocab_size=vocab)
    fields |= {name: value for name, value in extras.ids.items() if value is not None or name in fields}
    fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    config = with_fields(fields, extras.config, args)
    written_family = FAMILIES[family_of(config)]
    parameters = sum(math.prod(shape) for name, shape in shapes.items() if written_family.copy_of(name) is None)
    card = model_card(source, run_args, config, parameters, dtype, extras.card, averaged)
    if carried is not None and is_part:
        config = multimodal_config(config, extras.full_config, is_same_model(args, extras.config))
    files = {**extras.files, CARD: card, CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    return _Export(args, dtype, wide, vocab, written_family, shapes, files, carried, is_part)


def dtypes_to_write(
    source: Path, requested: torch.dtype | None
) -> tuple[torch.dtype, Mapping[tuple[int, str], torch.dtype]]:
    """Returns (dtype to write weights in, dtypes of parameters that stay wider).

    Parameters that may stay wider, such as those of routers, may be fp32 in a 16-bit model (`may_be_wide`);
    their dtypes are by (NeoX layer index, NeoX name). requested: dtype for all other weights; None: the one
    they have. Raises CheckpointError if they have several."""
    facts = describe_checkpoint(source)
    if requested is not None:
        return requested, {
            place: param_dtype for place, param_dtype in facts.wide.items() if param_dtype.itemsize > requested.itemsize
        }
    dtypes = facts.dtypes
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        dtype_names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise CheckpointError(f"{source}: its weights have several dtypes ({dtype_names}); choose one with --precision")
    dtype = next(iter(dtypes))
    return dtype, {place: param_dtype for place, param_dtype in facts.wide.items() if param_dtype != dtype}


def read_layers(
    source: OpenCheckpoint,
    args: ModelArgs,
    layers: Iterable[int],
    dtype: torch.dtype,
    wide: Mapping[tuple[int, str], torch.dtype],
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yields (NeoX layer index, the layer's full tensors by NeoX names), one layer at a time.

    args: the model's configuration, for one process. dtype, wide: from `dtypes_to_write`. If a layer does not
        fit the configuration, the remaining layers are still checked, and the CheckpointError names all
        problems."""
    problems: list[str] = []
    for layer in layers:
        try:
            tensors = load_weights(source, args, layers=[layer], tensor_rank=0, tensor_size=1, copy=False)[layer]
        except DamagedError:
            raise
        except CheckpointError as problem:
            summary, *lines = str(problem).splitlines()
            if not lines:
                raise
            problems += [line.strip() for line in lines]
            continue
        if not problems:
            yield (
                layer,
                {
                    name: cast_to(value, wide.get((layer, name), dtype), f"layer {layer}: {name}")
                    for name, value in tensors.items()
                },
            )
    if problems:
        raise CheckpointError(
            f"{source.path}: the weights do not fit the configuration:\n  " + "\n  ".join(_grouped(problems))
        )


def _grouped(problems: Iterable[str]) -> list[str]:
    """Merges equal lines about several layers into one line that names all these layers."""
    groups: dict[str, list[str]] = {}
    for line in dict.fromkeys(problems):
        match = re.fullmatch(r"(?:(\S+\.pt), )?layer (\d+)(:? .*)", line)
        groups.setdefault(match[3].removeprefix(":").strip() if match else line, []).append(match[2] if match else "")
    lines = []
    for text, layers in groups.items():
        numbers = sorted({int(layer) for layer in layers if layer})
        lines.append(text if not numbers else f"layer{'s' * (len(numbers) > 1)} {_ranges(numbers)}: {text}")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(start) if start == last else f"{start}-{last}" for start, last in runs)


@contextmanager
def new_folder(output: Path, size: int) -> Iterator[Path]:
    """Yields an empty temporary folder, which replaces the folder `output` at the end of the context.

    After an exception `output` is as before. size: bytes to be written. Raises CheckpointError, also if the
    folder cannot be written."""
    temporary = _begin_folder(output, size)
    try:
        yield temporary
        sync(temporary)
        _put_in_place(temporary, output)
    except OSError as problem:
        raise CheckpointError(f"{output}: cannot be written ({problem.strerror or problem})") from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _begin_folder(output: Path, size: int) -> Path:
    """Creates an empty temporary folder next to `output`, and returns its path.

    Raises CheckpointError if fewer than `size` bytes are free, or if `output` holds files that no export
    writes."""
    if output.exists():
        if not output.is_dir():
            raise CheckpointError(f"{output}: is a file; pass the path of a folder")
        entries = [path for place in (output, output / TEMPLATES) if place.is_dir() for path in place.iterdir()]
        names = {path.relative_to(output).as_posix(): path.is_dir() for path in entries}
        foreign = sorted(name for name, is_folder in names.items() if not _is_model_file(name, is_folder))
        if foreign:
            raise CheckpointError(
                f"{output}: holds files that no export writes ({shortened(foreign, 3)}); choose another folder"
            )
    temporary = output.with_name(f".tmp_{output.name}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        check_space(output.parent, size)
        if temporary.exists():
            shutil.rmtree(temporary)  # left by an interrupted call
        temporary.mkdir()
    except OSError as problem:
        raise CheckpointError(f"{output}: cannot be written ({problem.strerror}); choose another folder") from problem
    return temporary


def _is_model_file(name: str, is_folder: bool) -> bool:
    """Whether an earlier conversion may have written a file or folder of this name."""
    if is_folder:
        return name == TEMPLATES
    return _MODEL_FILES.fullmatch(name) is not None and (
        not name.startswith(f"{TEMPLATES}/") or name.endswith(".jinja")
    )


def check_space(folder: Path, size: int) -> None:
    """Raise CheckpointError if the disk of `folder` has no room for `size` bytes plus some spare space."""
    need_free(folder, size + _SPARE, "the result takes up to")


def recover(output: Path) -> None:
    """Rename the backup of an earlier folder to `output`, if an interrupted export left only the backup."""
    backup = output.with_name(f".old_{output.name}")
    if backup.exists() and not output.exists():
        os.rename(backup, output)


def _put_in_place(temporary: Path, output: Path) -> None:
    """Rename the complete folder `temporary` to `output`, replacing an earlier one."""
    recover(output)
    backup = output.with_name(f".old_{output.name}")
    if backup.exists():
        shutil.rmtree(backup)
    if output.exists():
        os.rename(output, backup)
    os.rename(temporary, output)
    sync(output.parent)
    shutil.rmtree(backup, ignore_errors=True)
