"""Folders in HuggingFace's format: found, read one tensor at a time, and written one tensor at a time.

Weights are read from safetensors (https://github.com/huggingface/safetensors: eight bytes with the header's
length, a JSON header, the tensors) or from pytorch_model.bin, of which nothing is run; they are written as
safetensors.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families import (
    FAMILIES,
    ExpertRows,
    gives_score,
    is_multimodal,
    lacks_prefix,
    rows_of_experts,
    text_config,
    text_names,
)
from megatron.checkpointing.families.family import Family
from megatron.checkpointing.huggingface.dequantize import Packed, Stored, dequantize, scheme_of, weight_dtype
from megatron.checkpointing.huggingface.model_files import CONFIG, other_kind, read_config, read_json
from megatron.checkpointing.tensor_files import OneBehind, load_tensors, write_bytes
from megatron.data.files import sync
from megatron.neox_arguments.errors import disk_problem, lfs_pointer_error

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_BIN = "pytorch_model.bin"
_PREFIX = "hf://"
# Dtypes of weights: what else a file may hold (masks, counters) is never asked for.
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {
    **{name: dtype for dtype, name in _NAMES.items()},
    "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8,  # what quantised weights are made of
}  # fmt: skip
_LARGEST_HEADER = 100 << 20  # as the safetensors library
TEMPLATES = "additional_chat_templates"  # a folder
LEGAL = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "*USE_POLICY*")  # terms that go where the weights go
SHARD_BYTES = 5 * 10**9


def is_hf(name: str | Path) -> bool:
    """Whether `load` means a HuggingFace model: hf://ORG/NAME, or a folder with its config.json."""
    path = Path(name)
    return str(name).startswith(_PREFIX) or (path / CONFIG).is_file() and not (path / "latest").exists()


def has_hf_score(path: str | Path) -> bool:
    """Whether the model of a folder is a reward model: its config.json names a class for sequence
    classification."""
    return gives_score(read_config(Path(path)))


def find_hf(name: str | Path, revision: str | None = None) -> Path:
    """The local folder of a model: a folder, or ORG/NAME[@revision] on the Hub (hf:// before it or not),
    downloaded unless it is in the Hub's local cache. Raises CheckpointError with what to do without a
    network, and for a revision of a folder."""
    text = str(name)
    if Path(text).is_dir():
        if revision is not None:
            raise CheckpointError(
                f"{text}: is a folder here and has no revisions; leave --revision {revision} out, or write "
                "hf://ORG/NAME for a model on the Hub"
            )
        return Path(text)
    if Path(text).is_file():
        raise CheckpointError(f"{text}: a file, not the folder of a HuggingFace model{other_kind(Path(text))}")
    hub = text.removeprefix(_PREFIX)
    hub, _, named_revision = hub.partition("@")
    revision = revision or named_revision or None
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub) or hub.startswith("."):
        raise CheckpointError(f"{text}: no such folder, and not ORG/NAME of a model on the Hub")
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise CheckpointError(f"{text}: needs the huggingface_hub package (pip install huggingface_hub)") from None
    small = ["*.json", "*.jinja", "*.txt", "*.model", "*.model.v*", "*.tiktoken", "*.md", *LEGAL]
    try:
        snapshot = Path(snapshot_download(hub, revision=revision, allow_patterns=[*small, "*.safetensors"]))
        if not any(snapshot.glob("*.safetensors")):
            snapshot = Path(snapshot_download(hub, revision=revision, allow_patterns=[*small, f"{_BIN[:-4]}*.bin"]))
    except Exception as problem:  # of huggingface_hub, of its transport, of the disk: all mean that it cannot be had
        if (disk := disk_problem(problem)) is not None:
            raise CheckpointError(
                f"{hub}: the cache of HuggingFace cannot be written ({disk}); set HF_HOME"
            ) from problem
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(
            f"{hub}{at}: cannot be had from the Hub and is not in its local cache ({reason}); without a network, run "
            f"`hf download {hub}` where there is one and copy the cache (HF_HOME), or give a local folder"
        ) from problem
    return snapshot


@dataclass(frozen=True)
class _Entry:
    """Where a tensor is stored. begin, end: its bytes in a safetensors file; 0, 0 in a file of another
    kind."""

    file: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0


class HFFolder:
    """A folder in HuggingFace's format, whose tensors are read one at a time.

    config: the content of config.json; of a multimodal model, that of its language model, whose tensors then
    are the folder's, under the names that they have alone. shapes: of all tensors, by name. carried: shapes
    of a multimodal model's other tensors, or of those that `Family.carried` names, by the names in the files.
    origin: what errors call the folder, where that is not its path. dtype: weights are cast to it when they
    are read; None: each keeps its own. of_transformers: transformers loads its files. untied: where
    config.json says that the head is the embedding, but the files hold another, which is read as its own:
    this in words.
    Weights that are quantised (`quantised` says how, in words; None: they are not) are read as numbers, by
    default in the dtype that config.json names, and their scales are no tensors of the folder.
    Raises CheckpointError for what is missing or damaged, or quantised in a way that is not known here.
    """

    of_transformers = True
    untied: str | None = None
    quantised: str | None = None
    carried: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def __init__(self, path: str | Path, origin: str | None = None, dtype: torch.dtype | None = None) -> None:
        self.path, self.dtype = Path(path), dtype
        self.origin = origin or str(path)
        file_config = read_config(self.path)
        self.config = text_config(file_config)
        self._scheme = scheme_of(file_config, self.origin)
        self._open: tuple[Path | None, Mapping[str, Tensor]] = (None, {})
        self._entries: dict[str, _Entry] = {}
        for file in self._weight_files():
            entries = _header(file) if file.suffix == ".safetensors" else _pickled(file)
            both = sorted(entries.keys() & self._entries.keys())
            if both:
                raise CheckpointError(f"{file}: {both[0]} is in {self._entries[both[0]].file.name} too")
            self._entries |= entries
        self._packed: Mapping[str, Packed] = {}
        hidden: set[str] = set()
        if self._scheme is not None:
            self._packed = self._scheme.packed({n: Stored(e.dtype, e.shape) for n, e in self._entries.items()})
            hidden = self._scheme.hidden(self._entries, self._packed)
            name = str(self.dtype or weight_dtype(self.config)).removeprefix("torch.")
            self.quantised = f"{len(self._packed)} weights are quantised ({self._scheme}) and read as {name}"
        stored = {name: entry.shape for name, entry in self._entries.items() if name not in hidden}
        self.shapes: Mapping[str, tuple[int, ...]] = stored | {name: of.shape for name, of in self._packed.items()}
        self._names: Mapping[str, str] = {}
        self._experts: Mapping[str, ExpertRows] = {}
        if is_multimodal(file_config):
            self._names = text_names(self.shapes)
            own = set(self._names.values())
            self.carried = {name: shape for name, shape in self.shapes.items() if name not in own}
            self.shapes = {name: self.shapes[stored] for name, stored in self._names.items()}
            # transformers reads that of the whole.
            tied = file_config.get("tie_word_embeddings", self.config.get("tie_word_embeddings", False))
            self.config["tie_word_embeddings"] = bool(tied) or "lm_head.weight" not in self.shapes
        elif (family := FAMILIES.get(str(self.config.get("model_type")))) is not None:
            self.carried = {name: shape for name, shape in self.shapes.items() if family.carries(name)}
            self.shapes = {name: shape for name, shape in self.shapes.items() if name not in self.carried}
            self._name_as_files(family)
        self._read_tie()

    def _read_tie(self) -> None:
        """Let `config` say what the files hold: a head that differs from the embedding is its own, as in
        transformers 5, whatever config.json says."""
        family = FAMILIES.get(str(self.config.get("model_type")))
        if family is None or gives_score(self.config):
            return
        embedding = next(row.theirs[0] for row in family.rows if row.ours == "word_embeddings.weight")
        if not {embedding, family.head} <= self.shapes.keys():
            return
        one, other = (self._uncast(name) for name in (embedding, family.head))
        if one.shape == other.shape and torch.equal(one[:1], other[:1]) and torch.equal(one, other):
            return
        try:
            says_tied = not family.to_keys(self.config)["no_weight_tying"]
        except CheckpointError:  # said by who reads the rest of it
            return
        if says_tied:
            self.config["tie_word_embeddings"] = False
            self.untied = (
                f"its {CONFIG} ties the head to the embedding, but {family.head} is stored and differs from "
                f"{embedding}: it is read as a head of its own, as transformers reads it"
            )

    def _name_as_files(self, family: Family) -> None:
        """Give tensors the names that they have in files of the family's class with a head."""
        if lacks_prefix(self.config, self.shapes):
            self._names = {name if name == family.head else family.base_prefix + name: name for name in self.shapes}
            self.shapes = {name: self.shapes[stored] for name, stored in self._names.items()}
        else:
            self._take_apart(family)

    def _take_apart(self, family: Family) -> None:
        """Give tensors that the folder names as transformers does in memory the names that files have, and
        those of all experts the shape of each expert's."""
        plain = {name: shape for name, shape in self.shapes.items() if name not in self._packed}
        self._experts = rows_of_experts(family, plain)
        renamed = {name: family.stored_names(name, 1)[0] for name in plain}
        whole = {part.stored for part in self._experts.values()}
        self._names = {to[0]: name for name, to in renamed.items() if to and name not in whole}
        if not self._names and not self._experts:
            return
        self._names |= {name: part.stored for name, part in self._experts.items()}
        shapes = {name: shape for name, shape in self.shapes.items() if name not in self._names.values()}
        for name, stored in self._names.items():
            part, shape = self._experts.get(name), self.shapes[stored]
            shapes[name] = shape if part is None else (part.rows.stop - part.rows.start, shape[2])
        self.shapes = shapes

    def _weight_files(self) -> list[Path]:
        for whole, index in ((WEIGHTS, INDEX), (_BIN, f"{_BIN}.index.json")):
            if (self.path / index).is_file():
                weight_map = read_json(self.path / index).get("weight_map") or {}
                if not isinstance(weight_map, dict) or not all(isinstance(n, str) for n in weight_map.values()):
                    raise CheckpointError(f"{self.path / index}: weight_map: expected a file's name for each tensor")
                names = sorted(set(weight_map.values()))
                missing = [name for name in names if not (self.path / name).is_file()]
                if missing or not names:
                    raise CheckpointError(f"{self.path}: incomplete, without {', '.join(missing) or 'any weights'}")
                return [self.path / name for name in names]
            if (self.path / whole).is_file():
                return [self.path / whole]
        none = f"{self.path}: holds no weights: no {WEIGHTS}, {_BIN}, nor an index of their parts"
        raise CheckpointError(none + other_kind(self.path))

    @property
    def stored_dtypes(self) -> dict[str, torch.dtype | None]:
        """The dtype of each tensor before it is cast; None for dtypes that are not those of weights."""
        own = {name: entry.dtype if entry.dtype in _NAMES else None for name, entry in self._entries.items()}
        own |= dict.fromkeys(self._packed, weight_dtype(self.config))
        return {name: own[self._names.get(name, name)] for name in self.shapes}

    @property
    def dtypes(self) -> dict[str, torch.dtype | None]:
        """The dtype of each tensor as it is read; None for dtypes that are not those of weights."""
        return {name: dtype and (self.dtype or dtype) for name, dtype in self.stored_dtypes.items()}

    @property
    def has_edge_blocks(self) -> bool:
        """Whether the last block of a quantised weight is smaller than the others. transformers 5 makes other
        numbers of such a weight: it spreads the scales over its rows evenly."""
        block = getattr(self._scheme, "block", None) or (1, 1)
        shapes = [packed.shape[-2:] for packed in self._packed.values()]
        return any(n > size and n % size for shape in shapes for n, size in zip(shape, block, strict=True))

    @property
    def vocab_size(self) -> int:
        size = self.config.get("vocab_size")
        if not isinstance(size, int):
            raise CheckpointError(f"{self.path / CONFIG}: vocab_size is missing")
        return size

    def get(self, name: str) -> Tensor:
        """One tensor, which stays in the file until it is used (memory map), cast, or dequantised.

        Raises CheckpointError where fp16 cannot hold its values.
        """
        part = self._experts.get(name)
        name = self._names.get(name, name)
        if name in self._packed:
            return self._dequantised(name)
        if self._entries[name].dtype not in _NAMES:
            raise CheckpointError(f"{self._entries[name].file}: {name} is no floating-point tensor")
        tensor = self._stored(name) if part is None else self._stored(name)[part.expert, part.rows]
        return tensor if self.dtype is None else cast_to(tensor, self.dtype, name)

    @property
    def carried_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each of the tensors `carried`. Raises CheckpointError for one that is no weight."""
        found = {}
        for name in self.carried:
            dtype = weight_dtype(self.config) if name in self._packed else self._entries[name].dtype
            if dtype not in _NAMES:
                raise CheckpointError(f"{self.origin}: {name} is no floating-point tensor, and is not carried along")
            found[name] = dtype
        return found

    def get_carried(self, name: str) -> Tensor:
        """One of the tensors `carried`, as it is stored unless that is quantised."""
        return self._dequantised(name) if name in self._packed else self._stored(name)

    def _uncast(self, name: str) -> Tensor:
        stored = self._names.get(name, name)
        return self._dequantised(stored) if stored in self._packed else self._stored(stored)

    def _stored(self, name: str) -> Tensor:
        entry = self._entries[name]
        if entry.file.suffix != ".safetensors":
            if self._open[0] != entry.file:
                self._open = (entry.file, load_tensors(entry.file))
            return self._open[1][name]
        return _mapped(entry)

    def _dequantised(self, name: str) -> Tensor:
        assert self._scheme is not None
        packed, dtype = self._packed[name], self.dtype or weight_dtype(self.config)
        values, scales = self._stored(packed.values), self._stored(packed.scales)
        weight = dequantize(self._scheme, values, scales, packed.shape, dtype)
        if dtype == torch.float16 and weight.isinf().any():
            raise CheckpointError(f"{name}: holds numbers that fp16 cannot; choose bf16 or fp32 with --precision")
        return weight


class SafetensorsFile:
    """One safetensors file, whose tensors are read one at a time. shapes: of all tensors of floating-point
    numbers, by name. Raises CheckpointError for a file that is missing or damaged."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        self._entries = {name: entry for name, entry in _header(path).items() if entry.dtype in _NAMES}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: entry.shape for name, entry in self._entries.items()}

    def get(self, name: str) -> Tensor:
        """A tensor in its own dtype."""
        return _mapped(self._entries[name])


def _mapped(entry: _Entry) -> Tensor:
    assert entry.dtype is not None
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=entry.dtype)
    # "c": writing to it changes no file
    data = np.memmap(entry.file, np.uint8, "c", entry.begin, (entry.end - entry.begin,))
    return torch.from_numpy(data).view(entry.dtype).view(entry.shape)


def load_named(file: Path) -> dict[str, Tensor]:
    """What `torch.save` wrote, tensors by name. Raises CheckpointError for anything else."""
    state = load_tensors(file)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{file}: not a file of tensors by name")
    return state


def _pickled(path: Path) -> dict[str, _Entry]:
    return {name: _Entry(path, value.dtype, tuple(value.shape)) for name, value in load_named(path).items()}


def _header(path: Path) -> dict[str, _Entry]:
    """What a safetensors file says of itself, held to its size."""
    size = path.stat().st_size
    if (pointer := lfs_pointer_error(path)) is not None:
        raise CheckpointError(pointer)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                raise ValueError(f"header of {length} bytes")
            raw = json.loads(file.read(length))
        raw.pop("__metadata__", None)
        entries = {}
        for name, fields in raw.items():
            begin, end = (8 + length + offset for offset in fields["data_offsets"])
            dtype, shape = _DTYPES.get(fields["dtype"]), tuple(fields["shape"])
            if dtype is not None and end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name}: {end - begin} bytes for {shape} of {fields['dtype']}")
            if not 8 + length <= begin <= end <= size:
                raise ValueError(f"{name} should end at byte {end}, the file has {size}")
            entries[name] = _Entry(path, dtype, shape, begin, end)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{path}: damaged, or not a safetensors file ({problem})") from problem
    return entries


def weight_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    return sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize


Dtypes = torch.dtype | Mapping[str, torch.dtype]
"""One dtype for all tensors, or that of each by its name."""


def _of(dtypes: Dtypes, name: str) -> torch.dtype:
    return dtypes if isinstance(dtypes, torch.dtype) else dtypes[name]


@dataclass(frozen=True)
class _PlannedFile:
    """A file of weights before it is written: name; header: its first bytes; begins: where each tensor
    begins in it; size: of all of it."""

    name: str
    header: bytes
    begins: Mapping[str, int]
    size: int


def _plan(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Dtypes, limit: int, whole: str = WEIGHTS
) -> list[_PlannedFile]:
    """The files of `write_weights`, tensors in the order given."""
    files: list[dict[str, tuple[int, int]]] = [{}]
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * _of(dtypes, name).itemsize
        if files[-1] and at + size > limit:
            files.append({})
            at = 0
        files[-1][name] = (at, at + size)
        at += size
    planned = []
    for i, tensors in enumerate(files):
        fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, offsets in tensors.items():
            dtype = _NAMES[_of(dtypes, name)]
            fields[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": list(offsets)}
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        file = whole if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        begins = {name: len(header) + begin for name, (begin, _) in tensors.items()}
        size = len(header) + max((end for _, end in tensors.values()), default=0)
        planned.append(_PlannedFile(file, header, begins, size))
    return planned


def _index(plan: Sequence[_PlannedFile]) -> bytes:
    """The content of the index of several files."""
    index = {
        "metadata": {"total_size": sum(file.size - len(file.header) for file in plan)},
        "weight_map": {name: file.name for file in plan for name in file.begins},
    }
    return (json.dumps(index, indent=2) + "\n").encode()


def planned_sizes(shapes: Mapping[str, tuple[int, ...]], dtypes: Dtypes, limit: int = SHARD_BYTES) -> dict[str, int]:
    """The files that `write_weights` would write, the index too, and their sizes in bytes."""
    plan = _plan(shapes, dtypes, limit)
    index = {INDEX: len(_index(plan))} if len(plan) > 1 else {}
    return {file.name: file.size for file in plan} | index


def write_weights(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Dtypes,
    tensors: Iterable[tuple[str, Tensor]],
    limit: int = SHARD_BYTES,
    whole: str = WEIGHTS,
    to_disk: Callable[[Path], None] = sync,
) -> None:
    """model.safetensors, or several of at most `limit` bytes (and one tensor at least) with their index.

    tensors: those of `shapes` in any order, each once; one is written while the next is made. whole: the name
    where it is one file. to_disk: syncs a file that is whole, or sees to it (`SyncBeside`). Raises
    CheckpointError.
    """
    plan = _plan(shapes, dtypes, limit, whole)
    file_of = {name: file for file in plan for name in file.begins}

    def write(file: _PlannedFile, name: str, data: memoryview) -> None:
        opened[file.name].seek(file.begins[name])
        opened[file.name].write(data)
        missing[file.name].remove(name)
        if not missing[file.name]:
            opened[file.name].close()
            to_disk(path / file.name)

    with ExitStack() as stack:
        opened = {file.name: stack.enter_context((path / file.name).open("wb")) for file in plan}
        for planned in plan:
            opened[planned.name].write(planned.header)
        missing = {file.name: set(file.begins) for file in plan}
        with OneBehind() as behind:
            for name, tensor in tensors:
                assert tuple(tensor.shape) == tuple(shapes[name]), name
                data = cast_to(tensor, _of(dtypes, name), name).contiguous().view(-1).view(torch.uint8).numpy().data
                behind(partial(write, file_of[name], name, data))
                del tensor, data
        assert not any(missing.values()), f"not given: {missing}"
    if len(plan) > 1:
        write_bytes(_index(plan), path / INDEX)


def cast_to(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """In another precision. Raises CheckpointError where a number becomes infinite (bf16 to fp16)."""
    cast = tensor.to(dtype)
    if dtype == torch.float16 and tensor.dtype != dtype and not cast.isfinite().all() and tensor.isfinite().all():
        raise CheckpointError(f"{name}: holds {tensor.abs().max():.3g}, which fp16 cannot; choose bf16 or fp32")
    return cast
