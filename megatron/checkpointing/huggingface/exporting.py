"""A checkpoint, ours or GPT-NeoX's in any layout, as a HuggingFace folder: streamed, checked, whole or not at
all."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError, DamagedError
from megatron.checkpointing.families import (
    TEXT_TOWERS,
    family_kept,
    hf_config,
    hf_names,
    hf_shapes,
    is_multimodal,
    is_same_model,
    stored_name,
    to_hf,
    whole_config,
    with_fields,
)
from megatron.checkpointing.huggingface.carried_tensors import carried_tensors
from megatron.checkpointing.huggingface.companion_files import (
    CARD,
    HF_SUBFOLDER,
    companion_files_of,
    write_companion_files,
)
from megatron.checkpointing.huggingface.folder import (
    CONFIG,
    SHARD_BYTES,
    TEMPLATES,
    HFFolder,
    SafetensorsFile,
    cast_to,
    planned_sizes,
    weight_bytes,
    write_weights,
)
from megatron.checkpointing.huggingface.logit_check import LogitComparison, compare_logits, plain_args
from megatron.checkpointing.huggingface.model_card import model_card
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.checkpointing.tensor_files import SyncBeside, need_free
from megatron.checkpointing.weight_files import describe_checkpoint
from megatron.checkpointing.weights import load_weights
from megatron.data.files import sync
from megatron.model.weight_map import layer_params
from megatron.neox_arguments import NeoXArgs

LayerProgress = Callable[[Iterable[int], int], Iterable[int]]
_SPARE = 64 << 20  # for the small files, and for a disk that is never filled to the last byte
# Files that an earlier conversion may have written, which a new one replaces.
_OWN = re.compile(
    r".*\.(safetensors|json|jinja|txt|md|tiktoken)|[\w.]+\.model(\.v\d+)?|pytorch_model.*\.bin|(LICEN[CS]E|COPYING|NOTICE|.*USE_POLICY).*"
)


def no_progress(layers: Iterable[int], count: int) -> Iterable[int]:
    return layers


@dataclass(frozen=True)
class _Export:
    """All of an export but the values of the weights.

    args: the model's, as of `plain_args`. dtype, shapes: of the weights that are written, by the names that
    `family` has for them. wide: parameters of ours in another dtype, in which they stay, by NeoX layer index
    and name. vocab: rows of vocabulary that are kept. files: content of the other files, by name. carried:
    tensors that no layer of ours has. is_part: these are the other ones of a multimodal model whose language
    model this is.
    """

    args: NeoXArgs
    dtype: torch.dtype
    wide: Mapping[tuple[int, str], torch.dtype]
    vocab: int
    family: str | None
    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, bytes]
    carried: SafetensorsFile | None
    is_part: bool

    @property
    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors of the folder, those that were carried along too."""
        return {self.name(name): shape for name, shape in self.shapes.items()} | self._carried_shapes

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of all tensors of the folder; carried ones keep theirs."""
        own = {self.name(name): self.dtype for name in self.shapes}
        for place, names in hf_names(self.args, self.wide, family=self.family).items():
            own |= {self.name(name): self.wide[place] for name in names}
        return own | {name: self.carried.get(name).dtype for name in self._carried_shapes if self.carried}

    @property
    def _carried_shapes(self) -> dict[str, tuple[int, ...]]:
        return {} if self.carried is None else dict(self.carried.shapes)

    def name(self, name: str) -> str:
        """The name that a tensor of our model has in the folder."""
        return stored_name(name, self.carried.shapes) if self.carried is not None and self.is_part else name

    def with_carried(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the folder. tensors: those of our model."""
        yield from ((self.name(name), tensor) for name, tensor in tensors)
        if self.carried is not None:
            yield from ((name, self.carried.get(name)) for name in self.carried.shapes)


def export_hf(
    source: str | Path,
    args: NeoXArgs,
    output: str | Path,
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: bool = True,
    vocab_is_hf: bool = False,
    pad_token_id: int | None = None,
    check: bool = True,
    shard_bytes: int = SHARD_BYTES,
    each: LayerProgress = no_progress,
    notes: Mapping[str, bytes] | None = None,
) -> LogitComparison | None:
    """Write checkpoint `source` (of `args`, see `load_checkpoint_args`) as the HuggingFace folder `output`.

    dtype: of the weights that are written; None: that of the checkpoint. family: a `model_type`; None: that
    of the model that was imported, all of it where that was multimodal, else the first that computes what
    `args` says. check: compare logits with transformers before the folder appears; returns the comparison.
    each: wraps the layers, for a progress bar. notes: further .json files by name. A tensor is written while
    the next is read, and while the files of later layers are checked against the manifest, each before it is
    used; no others are in memory. A folder of an earlier conversion is replaced; an interrupted call is
    simply made again. Raises CheckpointError."""
    source, output = Path(source), Path(output).resolve()
    opened = OpenCheckpoint(source)
    of_layers = [file.name for _, file in sorted(layout.layer_files(source).items())]
    opened.verify(set(opened.names).difference(of_layers))
    made = _prepare(source, args, family, dtype, tokenizer, vocab_is_hf, pad_token_id)
    temporary = begin_folder(output, weight_bytes(made.all_shapes, made.dtype))
    try:
        with opened.verifying_ahead(of_layers), SyncBeside() as to_disk:
            layers = sorted(layer_params(made.args))
            read = read_layers(opened, made.args, each(layers, len(layers)), made.dtype, made.wide)
            tensors = made.with_carried(to_hf(made.args, read, family=made.family, vocab_size=made.vocab, copy=False))
            write_weights(temporary, made.all_shapes, made.dtypes, tensors, shard_bytes, to_disk=to_disk)
        write_companion_files({**made.files, **(notes or {})}, temporary)

        def weights(layer: int) -> Mapping[str, Tensor]:
            return dict(read_layers(opened, made.args, [layer], made.dtype, made.wide))[layer]

        comparison = None
        if check:
            comparison = compare_logits(HFFolder(temporary, str(output)), made.args, weights, made.vocab)
        sync(temporary)
        put_in_place(temporary, output)
    except OSError as problem:
        raise CheckpointError(f"{output}: cannot be written ({problem.strerror or problem})") from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return comparison


def export_plan(
    source: str | Path,
    args: NeoXArgs,
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: bool = True,
    vocab_is_hf: bool = False,
    pad_token_id: int | None = None,
) -> dict[str, int]:
    """The files that `export_hf` would write and their sizes in bytes; no weight is read. Arguments and
    errors as there."""
    made = _prepare(Path(source), args, family, dtype, tokenizer, vocab_is_hf, pad_token_id)
    return planned_sizes(made.all_shapes, made.dtypes) | {name: len(content) for name, content in made.files.items()}


def _prepare(
    source: Path,
    args: NeoXArgs,
    family: str | None,
    dtype: torch.dtype | None,
    tokenizer: bool,
    vocab_is_hf: bool,
    pad_token_id: int | None,
) -> _Export:
    """Arguments and errors as of `export_hf`."""
    if args.lora is not None:
        raise CheckpointError(
            f"{source}: holds adapters beside its weights; merge them first (tools/ckpts/adapter.py merge), or write "
            "them as peft's (export)"
        )
    given, args = args, plain_args(args)
    dtype, wide = dtypes_to_write(source, dtype)
    extras = companion_files_of(
        source, args, tokenizer=tokenizer, vocab_is_hf=vocab_is_hf, pad_token_id=pad_token_id,
        scores=bool(args.score_head),
    )  # fmt: skip
    assert args.padded_vocab_size is not None
    vocab = extras.vocab_size or args.padded_vocab_size
    if extras.tokens is not None and extras.tokens > args.padded_vocab_size:
        raise CheckpointError(
            f"{source}: its tokenizer has {extras.tokens} tokens, its embedding {args.padded_vocab_size} rows: the "
            "tokenizer of another model; set vocab_file to the one it was trained with"
        )
    vocab = max(vocab, extras.tokens or 0)
    kept = family_kept(args, extras.config)
    if family in TEXT_TOWERS:
        if kept is None or extras.whole.get("model_type") != family:
            raise CheckpointError(f"{source}: was not imported from a {family} model, whose other parts it would need")
        family = None
    is_part = is_multimodal(extras.whole)
    same = kept is not None and (family is None or (family == kept and not is_part))
    carried = carried_tensors(source / HF_SUBFOLDER) if same else None
    family = family or kept
    shapes = hf_shapes(args, family=family, vocab_size=vocab)
    ids = {**extras.ids, "torch_dtype": str(dtype).removeprefix("torch.")}
    config = with_fields({**hf_config(args, family=family, vocab_size=vocab), **ids}, extras.config, args)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    card = model_card(source, given, config, parameters, dtype, extras.card)
    if carried is not None and is_part:
        config = whole_config(config, extras.whole, is_same_model(args, extras.config))
    files = {**extras.files, CARD: card, CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    return _Export(args, dtype, wide, vocab, family, shapes, files, carried, is_part)


def dtypes_to_write(
    source: Path, asked: torch.dtype | None
) -> tuple[torch.dtype, Mapping[tuple[int, str], torch.dtype]]:
    """The dtype in which the weights of a checkpoint are written, and parameters that stay in another, by
    NeoX layer index and name: those that may be fp32 beside 16 bits (`may_be_wide`) and are. asked: for the
    others; None: they keep their own. Raises CheckpointError where that is not one."""
    facts = describe_checkpoint(source)
    if asked is not None:
        return asked, {place: of for place, of in facts.wide.items() if of.itemsize > asked.itemsize}
    dtypes = facts.dtypes
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        dtype_names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise CheckpointError(
            f"{source}: its weights are of several kinds ({dtype_names}); choose one with --precision"
        )
    dtype = next(iter(dtypes))
    return dtype, {place: of for place, of in facts.wide.items() if of != dtype}


def read_layers(
    source: OpenCheckpoint,
    args: NeoXArgs,
    layers: Iterable[int],
    dtype: torch.dtype,
    wide: Mapping[tuple[int, str], torch.dtype],
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Whole layers one after another, in the dtypes of `dtypes_to_write`. args: as of `plain_args`. Where one
    does not fit, the others are still looked at, and all is told, in a CheckpointError."""
    problems: list[str] = []
    for layer in layers:
        try:
            whole = load_weights(source, args, layers=[layer], tensor_rank=0, tensor_size=1, copy=False)[layer]
        except DamagedError:
            raise
        except CheckpointError as problem:
            first, *lines = str(problem).splitlines()
            if not lines:
                raise
            problems += [line.strip() for line in lines]
            continue
        if not problems:
            dtypes = {name: wide.get((layer, name), dtype) for name in whole}
            yield layer, {name: cast_to(value, dtypes[name], f"layer {layer}: {name}") for name, value in whole.items()}
    if problems:
        raise CheckpointError(f"{source.path}: does not fit this model:\n  " + "\n  ".join(_grouped(problems)))


def _grouped(problems: Iterable[str]) -> list[str]:
    """The problems with one line for all layers that have the same."""
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
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def begin_folder(output: Path, needed: int) -> Path:
    """An empty folder beside `output`, once it is known that all will fit and nothing foreign is in the
    way."""
    if output.exists():
        if not output.is_dir():
            raise CheckpointError(f"{output}: is a file; give a folder")
        inside = [path for place in (output, output / TEMPLATES) if place.is_dir() for path in place.iterdir()]
        names = {path.relative_to(output).as_posix(): path.is_dir() for path in inside}
        foreign = sorted(name for name, is_folder in names.items() if not _is_own(name, is_folder))
        if foreign:
            more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
            raise CheckpointError(f"{output}: holds {', '.join(foreign[:3])}{more}, no model's; give another folder")
    temporary = output.with_name(f".tmp_{output.name}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        check_space(output.parent, needed)
        if temporary.exists():
            shutil.rmtree(temporary)  # of an interrupted call
        temporary.mkdir()
    except OSError as problem:
        raise CheckpointError(f"{output}: cannot be written ({problem.strerror}); give another folder") from problem
    return temporary


def _is_own(name: str, is_folder: bool) -> bool:
    """Whether an earlier conversion may have written what has this name in its folder."""
    if is_folder:
        return name == TEMPLATES
    return _OWN.fullmatch(name) is not None and (not name.startswith(f"{TEMPLATES}/") or name.endswith(".jinja"))


def check_space(folder: Path, needed: int) -> None:
    """Raise CheckpointError where `needed` bytes and some more do not fit on the disk of `folder`."""
    need_free(folder, needed + _SPARE, "the result takes up to")


def recover(output: Path) -> None:
    """Give a folder that an interrupted call had set aside its name back."""
    aside = output.with_name(f".old_{output.name}")
    if aside.exists() and not output.exists():
        os.rename(aside, output)


def put_in_place(temporary: Path, output: Path) -> None:
    """Give a folder that is whole the name `output`, in the place of an earlier one."""
    recover(output)
    aside = output.with_name(f".old_{output.name}")
    if aside.exists():
        shutil.rmtree(aside)
    if output.exists():
        os.rename(output, aside)
    os.rename(temporary, output)
    sync(output.parent)
    shutil.rmtree(aside, ignore_errors=True)
