"""Finds folders in HuggingFace's format, and reads them one tensor at a time.

Weights are read from safetensors files (https://github.com/huggingface/safetensors: eight bytes with the
header's length, a JSON header, the tensors) or from pytorch_model.bin, without running code in it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.convert import lacks_prefix
from megatron.checkpointing.families.experts import ExpertRows, rows_of_experts
from megatron.checkpointing.families.family import Family, gives_score
from megatron.checkpointing.families.multimodal import is_multimodal, text_config, text_names
from megatron.checkpointing.families.registry import FAMILIES
from megatron.checkpointing.huggingface.dequantize import Nvfp4, Packed, Stored, dequantize, scheme_of, weight_dtype
from megatron.checkpointing.huggingface.model_files import CONFIG, other_kind, read_config, read_json
from megatron.checkpointing.tensor_files import load_tensors
from megatron.neox_arguments.errors import disk_problem, lfs_pointer_error
from megatron.neox_arguments.values.json_text import parse_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_BIN = "pytorch_model.bin"
_PREFIX = "hf://"
# Dtypes of weights. Other tensors of a file (masks, counters) are never read.
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {
    **{name: dtype for dtype, name in DTYPE_NAMES.items()},
    "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8,  # dtypes that store quantised weights
}  # fmt: skip
_LARGEST_HEADER = 100 << 20  # the limit of the safetensors library
TEMPLATES = "additional_chat_templates"  # name of a folder
LEGAL = (
    "LICENSE*",
    "LICENCE*",
    "COPYING*",
    "NOTICE*",
    "*USE_POLICY*",
)  # terms of use, which are copied with the weights


def is_hf(name: str | Path) -> bool:
    """Whether a value of `load` is a HuggingFace model: hf://ORG/NAME, or a folder with a config.json."""
    path = Path(name)
    return str(name).startswith(_PREFIX) or (path / CONFIG).is_file() and not (path / "latest").exists()


def has_hf_score(path: str | Path) -> bool:
    """Whether a folder's config.json describes a reward model: its class is for sequence classification."""
    return gives_score(read_config(Path(path)))


def find_hf(name: str | Path, revision: str | None = None) -> Path:
    """Returns the local folder of a model, downloaded from the Hub unless it is in the local cache.

    name: a folder, or ORG/NAME[@revision] on the Hub, with or without hf://. Raises CheckpointError, which
        says what to do without a network; also raises it if `name` is a folder and `revision` is set."""
    text = str(name)
    if Path(text).is_dir():
        if revision is not None:
            raise CheckpointError(
                f"{text}: is a local folder, which has no revisions; leave --revision {revision} out, or write "
                "hf://ORG/NAME for a model on the Hub"
            )
        return Path(text)
    if Path(text).is_file():
        raise CheckpointError(f"{text}: is a file; pass the folder of a HuggingFace model{other_kind(Path(text))}")
    hub = text.removeprefix(_PREFIX)
    hub, _, named_revision = hub.partition("@")
    revision = revision or named_revision or None
    is_path = not text.startswith(_PREFIX) and "/" in text and Path(text).parent.is_dir()  # such as checkpoints/x
    if is_path or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub) or hub.startswith("."):
        raise CheckpointError(f"{text}: no such folder, and no name on the Hub (ORG/NAME)")
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise CheckpointError(f"{text}: needs the huggingface_hub package (pip install huggingface_hub)") from None
    small = ["*.json", "*.jinja", "*.txt", "*.model", "*.model.v*", "*.tiktoken", "*.md", *LEGAL]
    try:
        snapshot = Path(snapshot_download(hub, revision=revision, allow_patterns=[*small, "*.safetensors"]))
        if not any(snapshot.glob("*.safetensors")):
            snapshot = Path(snapshot_download(hub, revision=revision, allow_patterns=[*small, f"{_BIN[:-4]}*.bin"]))
    except Exception as problem:  # any error of huggingface_hub, network or disk: the model cannot be fetched
        if (disk := disk_problem(problem)) is not None:
            raise CheckpointError(
                f"{hub}: HuggingFace's cache cannot be written ({disk}); set HF_HOME to another folder"
            ) from problem
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        revision_text = f" at revision {revision}" if revision else ""
        raise CheckpointError(
            f"{hub}{revision_text}: cannot be fetched from the Hub and is not in its local cache ({reason}); without a "
            f"network, copy the cache (HF_HOME) of a machine that ran `hf download {hub}`, or give a local folder"
        ) from problem
    return snapshot


@dataclass(frozen=True)
class _Entry:
    """The place of a tensor in a file. begin, end: byte offsets in a safetensors file; 0 in other files.

    dtype: None for a dtype that is not supported.
    """

    file: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0


class HFFolder:
    """A folder in HuggingFace's format, whose tensors are read one at a time.

    config: the content of config.json; for a multimodal model, the part for its language model.
    shapes: of all weights, by name; for a multimodal model, of its language model's weights, by the names
        without the multimodal prefix.
    carried: shapes of tensors that NeoX models lack and that are copied unchanged, by names in the files.
    origin: the folder's name in errors; None: its path.
    dtype: weights are cast to this dtype when read; None: each keeps its own.
    is_transformers_format: whether transformers can load the files.
    untied: a message for the user if config.json ties the head to the embedding but the files hold a
        different head, which is then read as untied; else None.
    quantised: a message about quantised weights; None if there are none. `get` dequantises them, by default
        to the dtype in config.json; their scales are not in `shapes`.
    left_out: a message about tensors for multi-token prediction that a run would not train: blocks after the
        last, which are not read (`Family.predicts_more`), or tensors in `carried`; None: there are none.
    mtp_layers: number of these blocks that are read, for multi-token prediction. Their copies of embedding
        and head are not in `shapes`.
    Raises CheckpointError for missing or damaged files, for unsupported quantisation, and for fewer such
    blocks or other copies.
    """

    is_transformers_format = True
    untied: str | None = None
    quantised: str | None = None
    left_out: str | None = None
    carried: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def __init__(
        self, path: str | Path, origin: str | None = None, dtype: torch.dtype | None = None, mtp_layers: int = 0
    ) -> None:
        self.path, self.dtype, self.mtp_layers = Path(path), dtype, mtp_layers
        self.origin = origin or str(path)
        file_config = read_config(self.path)
        self.config = text_config(file_config)
        self._scheme = scheme_of(file_config, self.path, self.origin)
        self._open: tuple[Path | None, Mapping[str, Tensor]] = (None, {})
        self._entries: dict[str, _Entry] = {}
        for file in self._weight_files():
            entries = _header(file) if file.suffix == ".safetensors" else _pickled(file)
            duplicates = sorted(entries.keys() & self._entries.keys())
            if duplicates:
                raise CheckpointError(
                    f"{file}: tensor {duplicates[0]} is also in {self._entries[duplicates[0]].file.name}; only "
                    "one file may hold it"
                )
            self._entries |= entries
        self._packed: Mapping[str, Packed] = {}
        hidden: set[str] = set()
        if self._scheme is not None:
            self._packed = self._scheme.packed({n: Stored(e.dtype, e.shape) for n, e in self._entries.items()})
            hidden = self._scheme.hidden(self._entries, self._packed)
            name = str(self.dtype or weight_dtype(self.config)).removeprefix("torch.")
            self.quantised = f"{len(self._packed)} weights are quantised ({self._scheme}) and read as {name}"
        stored = {name: entry.shape for name, entry in self._entries.items() if name not in hidden}
        self.shapes: Mapping[str, tuple[int, ...]] = stored | {
            name: packed.shape for name, packed in self._packed.items()
        }
        self._names: Mapping[str, str] = {}
        self._copies: Mapping[str, str] = {}  # names of copies for multi-token prediction: our names of the originals
        self._experts: Mapping[str, ExpertRows] = {}
        if is_multimodal(file_config):
            text_family = FAMILIES[self.config["model_type"]]
            self._names = text_names(self.shapes)
            if mtp_layers:
                self._names |= {name: name for name in self.shapes if text_family.predicts(name)}
            text_tensors = set(self._names.values())
            self.carried = {name: shape for name, shape in self.shapes.items() if name not in text_tensors}
            self.shapes = {name: self.shapes[stored] for name, stored in self._names.items()}
            self._unstack_experts(text_family)
            # transformers prefers the field outside text_config.
            tied = file_config.get("tie_word_embeddings", self.config.get("tie_word_embeddings", False))
            self.config["tie_word_embeddings"] = bool(tied) or "lm_head.weight" not in self.shapes
        elif (family := FAMILIES.get(str(self.config.get("model_type")))) is not None:
            self.carried = {n: s for n, s in self.shapes.items() if family.carries(n)}
            self.carried = {n: s for n, s in self.carried.items() if not (mtp_layers and family.predicts(n))}
            self.shapes = {name: shape for name, shape in self.shapes.items() if name not in self.carried}
            self._leave_out(family)
            self._name_as_files(family)
        self._tell_untrained()
        self._read_tie()
        if mtp_layers:
            self._check_prediction_blocks()

    def _tell_untrained(self) -> None:
        """Set `left_out` if `carried` has tensors for multi-token prediction."""
        family = FAMILIES.get(str(self.config.get("model_type")))
        names = [] if family is None else sorted(name for name in self.carried if family.carries(name))
        if family is not None and names:
            reads = "; mtp_num_layers (--mtp-num-layers) trains them" if family.has_mtp_block else ""
            self.left_out = (
                f"{len(names)} tensors for multi-token prediction ({names[0]}, ..) are copied unchanged, so they will "
                f"not fit the model once it is trained{reads}"
            )

    def _read_tie(self) -> None:
        """Set `tie_word_embeddings` in `config` to false if the files hold a head that differs from the
        embedding.

        transformers 5 does the same, whatever config.json says."""
        family = FAMILIES.get(str(self.config.get("model_type")))
        if family is None or gives_score(self.config):
            return
        embedding = next(row.hf_names[0] for row in family.rows if row.neox_name == "word_embeddings.weight")
        if not {embedding, family.head} <= self.shapes.keys():
            return
        embedding_value, head_value = (self.get_carried(self._names.get(n, n)) for n in (embedding, family.head))
        if (
            embedding_value.shape == head_value.shape
            and torch.equal(embedding_value[:1], head_value[:1])
            and torch.equal(embedding_value, head_value)
        ):
            return
        try:
            says_tied = not family.to_keys(self.config)["no_weight_tying"]
        except CheckpointError:  # raised again by the caller that reads the other fields
            return
        if says_tied:
            self.config["tie_word_embeddings"] = False
            self.untied = (
                f"its {CONFIG} ties the head to the embedding, but {family.head} is stored and differs from "
                f"{embedding}: the head is read as untied, as transformers does"
            )

    def _leave_out(self, family: Family) -> None:
        """Removes blocks after the last from `shapes`."""
        blocks = self.config.get("num_hidden_layers")
        if not isinstance(blocks, int):
            return
        blocks += self.mtp_layers
        read = {name: shape for name, shape in self.shapes.items() if not family.leaves_out(name, blocks)}
        if len(read) < len(self.shapes):
            self.left_out = (
                f"{len(self.shapes) - len(read)} tensors of layers.{blocks} and later are left out: they are for "
                "multi-token prediction; mtp_num_layers (--mtp-num-layers) reads them"
            )
        self._copies = {name: copied for name in read if (copied := family.copy_of(name)) is not None}
        self.shapes = {name: shape for name, shape in read.items() if name not in self._copies}

    def _check_prediction_blocks(self) -> None:
        """Raise CheckpointError if there are fewer than `mtp_layers` blocks for multi-token prediction.

        Also if their copy of the embedding or the head differs from the model's."""
        family = FAMILIES.get(str(self.config.get("model_type")))
        stored, field = 0, "num_nextn_predict_layers"
        if family is not None and family.predicts_more:
            stored = self.config.get(field) or 0
        elif family is not None and family.has_mtp_block:
            stored, field = int("mtp.fc.weight" in self.shapes), "mtp.fc"
        if family is None or stored < self.mtp_layers:
            raise CheckpointError(
                f"{self.origin}: has {stored} layers for multi-token prediction ({field}), not {self.mtp_layers}; "
                "lower mtp_num_layers, or remove it"
            )
        unknown = sorted(name for name in self.carried if family.has_mtp_block and family.carries(name))
        if unknown:
            raise CheckpointError(
                f"{self.origin}: {unknown[0]} fits no block for multi-token prediction; remove mtp_num_layers"
            )
        for name, copied in self._copies.items():
            source = next(row.hf_names[0] for row in family.rows if row.neox_name == copied)
            if source not in self.shapes:  # a tied head
                source = next(row.hf_names[0] for row in family.rows if row.neox_name == "word_embeddings.weight")
            if not torch.equal(self.get_carried(name), self.get_carried(self._names.get(source, source))):
                raise CheckpointError(
                    f"{self.origin}: {name} differs from {source}, but multi-token prediction shares it here; remove "
                    "mtp_num_layers"
                )

    def _name_as_files(self, family: Family) -> None:
        """Rename tensors in `shapes` to the names that the family's class with a head writes to files."""
        if lacks_prefix(self.config, self.shapes):
            self._names = {name if name == family.head else family.base_prefix + name: name for name in self.shapes}
            self.shapes = {name: self.shapes[stored] for name, stored in self._names.items()}
        else:
            self._unstack_experts(family)

    def _unstack_experts(self, family: Family) -> None:
        """Rename tensors in `shapes` from names in memory to names in files, and split stacked experts."""
        unquantised = {n: s for n, s in self.shapes.items() if self._names.get(n, n) not in self._packed}
        self._experts = rows_of_experts(family, unquantised)
        renamed = {name: family.stored_names(name, 1)[0] for name in unquantised}
        stacked = {part.stored for part in self._experts.values()}
        names = {to[0]: name for name, to in renamed.items() if to and name not in stacked}
        names |= {name: part.stored for name, part in self._experts.items()}
        shapes = {name: shape for name, shape in self.shapes.items() if name not in names.values()}
        for name, memory_name in names.items():
            part, shape = self._experts.get(name), self.shapes[memory_name]
            shapes[name] = shape if part is None else (part.rows.stop - part.rows.start, shape[2])
        single = {name: stored for name, stored in self._names.items() if name in shapes}
        self._names = single | {name: self._names.get(memory_name, memory_name) for name, memory_name in names.items()}
        self.shapes = shapes

    def _weight_files(self) -> list[Path]:
        for weights_file, index in ((WEIGHTS, INDEX), (_BIN, f"{_BIN}.index.json")):
            if (self.path / index).is_file():
                weight_map = read_json(self.path / index).get("weight_map") or {}
                if not isinstance(weight_map, dict) or not all(isinstance(n, str) for n in weight_map.values()):
                    raise CheckpointError(
                        f"{self.path / index}: weight_map: must be an object {{tensor name: file name}}"
                    )
                names = sorted(set(weight_map.values()))
                missing = [name for name in names if not (self.path / name).is_file()]
                if missing or not names:
                    raise CheckpointError(
                        f"{self.path}: incomplete: missing {', '.join(missing) or 'all weight files'}"
                    )
                return [self.path / name for name in names]
            if (self.path / weights_file).is_file():
                return [self.path / weights_file]
        message = f"{self.path}: holds no weights: neither {WEIGHTS} nor {_BIN}, nor an index of either"
        raise CheckpointError(message + other_kind(self.path))

    @property
    def stored_dtypes(self) -> dict[str, torch.dtype | None]:
        """The dtype of each tensor before any cast, by name; None if it is not floating-point."""
        dtypes = {name: entry.dtype if entry.dtype in DTYPE_NAMES else None for name, entry in self._entries.items()}
        dtypes |= dict.fromkeys(self._packed, weight_dtype(self.config))
        return {name: dtypes[self._names.get(name, name)] for name in self.shapes}

    @property
    def dtypes(self) -> dict[str, torch.dtype | None]:
        """The dtype of each tensor that `get` returns, by name; None if it is not floating-point."""
        return {name: dtype and (self.dtype or dtype) for name, dtype in self.stored_dtypes.items()}

    @property
    def has_edge_blocks(self) -> bool:
        """Whether the last FP8 block of some weight is smaller than the others.

        transformers 5 dequantises such a weight differently: all its blocks get about the same size."""
        block = getattr(self._scheme, "block", None) or (1, 1)
        shapes = [packed.shape[-2:] for packed in self._packed.values()]
        return any(n > size and n % size for shape in shapes for n, size in zip(shape, block, strict=True))

    @property
    def is_nvfp4(self) -> bool:
        """Whether weights are in NVFP4, which transformers cannot dequantise without other packages."""
        return isinstance(self._scheme, Nvfp4)

    @property
    def vocab_size(self) -> int:
        size = self.config.get("vocab_size")
        if not isinstance(size, int):
            raise CheckpointError(f"{self.path / CONFIG}: vocab_size is missing or not a whole number")
        return size

    def get(self, name: str) -> Tensor:
        """Returns one tensor by its name in `shapes`: cast to `dtype` if set, dequantised if quantised.

        Raises CheckpointError if fp16 cannot hold its values."""
        part = self._experts.get(name)
        name = self._names.get(name, name)
        if name in self._packed:
            return self._dequantised(name)
        if self._entries[name].dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{self._entries[name].file}: {name} is not a floating-point tensor")
        tensor = self._stored(name) if part is None else self._stored(name)[part.expert, part.rows]
        return tensor if self.dtype is None else cast_to(tensor, self.dtype, name)

    @property
    def carried_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor in `carried`, by name. Raises CheckpointError for integer tensors."""
        dtypes = {}
        for name in self.carried:
            dtype = weight_dtype(self.config) if name in self._packed else self._entries[name].dtype
            if dtype not in DTYPE_NAMES:
                raise CheckpointError(
                    f"{self.origin}: {name} is not a floating-point tensor, and only such tensors are copied unchanged"
                )
            dtypes[name] = dtype
        return dtypes

    def get_carried(self, name: str) -> Tensor:
        """Returns one tensor by its name in the files: as stored, or dequantised.

        Unlike `get` it also returns tensors of `carried`."""
        return self._dequantised(name) if name in self._packed else self._stored(name)

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
        weight = dequantize(self._scheme, self._stored, packed, dtype)
        if dtype == torch.float16 and weight.isinf().any():
            raise CheckpointError(f"{name}: holds numbers too large for fp16; choose bf16 or fp32 with --precision")
        return weight


class SafetensorsFile:
    """One safetensors file, whose tensors are read one at a time.

    shapes: of all floating-point tensors, by name. Raises CheckpointError for a missing or damaged file.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        self._entries = {name: entry for name, entry in _header(path).items() if entry.dtype in DTYPE_NAMES}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: entry.shape for name, entry in self._entries.items()}

    def get(self, name: str) -> Tensor:
        """Returns the tensor `name` in its stored dtype, memory-mapped."""
        return _mapped(self._entries[name])


def _mapped(entry: _Entry) -> Tensor:
    if entry.dtype is None:
        raise CheckpointError(f"{entry.file}: holds a tensor of a dtype that cannot be read; copy the file again")
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=entry.dtype)
    # mode "c" (copy on write): writing to the tensor does not change the file
    data = np.memmap(entry.file, np.uint8, "c", entry.begin, (entry.end - entry.begin,))
    return torch.from_numpy(data).view(entry.dtype).view(entry.shape)


class PickledFile:
    """A file in which `torch.save` wrote a dict of tensors, with the methods of `SafetensorsFile`."""

    def __init__(self, path: Path) -> None:
        self._tensors = {name: value for name, value in load_named(path).items() if value.dtype in DTYPE_NAMES}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(value.shape) for name, value in self._tensors.items()}

    def get(self, name: str) -> Tensor:
        """Returns the tensor `name` in its stored dtype."""
        return self._tensors[name]


def load_named(file: Path) -> dict[str, Tensor]:
    """Reads a file in which `torch.save` wrote {name: tensor}. Raises CheckpointError for other content."""
    state = load_tensors(file)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{file}: does not hold a dict of tensors by name")
    return state


def _pickled(path: Path) -> dict[str, _Entry]:
    return {name: _Entry(path, value.dtype, tuple(value.shape)) for name, value in load_named(path).items()}


def _header(path: Path) -> dict[str, _Entry]:
    """Returns the place of each tensor of a safetensors file, by name, from the file's header.

    Raises CheckpointError if the header does not fit the file's size."""
    size = path.stat().st_size
    if (pointer := lfs_pointer_error(path)) is not None:
        raise CheckpointError(pointer)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                raise ValueError(f"its header cannot have {length} bytes")
            raw = parse_json(file.read(length))
        raw.pop("__metadata__", None)
        entries = {}
        for name, fields in raw.items():
            begin, end = (8 + length + offset for offset in fields["data_offsets"])
            dtype, shape = _DTYPES.get(fields["dtype"]), tuple(fields["shape"])
            if dtype is not None and end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name}: its {end - begin} bytes do not fit shape {shape} of dtype {fields['dtype']}")
            if not 8 + length <= begin <= end <= size:
                raise ValueError(f"{name} should end at byte {end}, but the file has {size} bytes")
            entries[name] = _Entry(path, dtype, shape, begin, end)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{path}: damaged, or not a safetensors file ({problem})") from problem
    return entries


def cast_to(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Returns `tensor` converted to `dtype`. Raises CheckpointError if fp16 cannot hold one of its numbers.

    name: of the tensor, for the error."""
    cast = tensor.to(dtype)
    if dtype == torch.float16 and tensor.dtype != dtype and not cast.isfinite().all() and tensor.isfinite().all():
        raise CheckpointError(f"{name}: fp16 cannot hold its value {tensor.abs().max():.3g}; choose bf16 or fp32")
    return cast
