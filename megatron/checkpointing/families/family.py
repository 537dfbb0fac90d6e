"""Describes a family of HuggingFace models: its tensor names, and the conversion of its config.json.

A `TensorMapping` connects one NeoX parameter with HuggingFace's tensors: `join` makes the parameter from
them, `split` undoes this bit for bit. Shapes, tensor-parallel splits and initial values of NeoX parameters
are in `model.weight_map`. All families are in `registry.FAMILIES`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.model.specs import AttentionSpec, MixerSpec
from megatron.neox_arguments import ModelArgs, NeoXArgs

Config = Mapping[str, Any]
SCORES = "ForSequenceClassification"  # names of classes for reward models end so


def gives_score(config: Config) -> bool:
    """Whether a config.json describes a reward model: its class is one for sequence classification."""
    return any(str(name).endswith(SCORES) for name in config.get("architectures") or ())


@dataclass(frozen=True)
class Transform:
    """Converts the HuggingFace tensors of one NeoX parameter to this parameter, and back.

    join: takes the full HuggingFace tensors, in the order of `TensorMapping.hf_names`; returns the parameter.
    split: takes the parameter; returns the HuggingFace tensors.
    The second argument of both is the spec of the layer's mixer; None for a layer without one.
    """

    join: Callable[[Sequence[Tensor], MixerSpec | None], Tensor]
    split: Callable[[Tensor, MixerSpec | None], tuple[Tensor, ...]]


def _join_qkv(parts: Sequence[Tensor], attention: MixerSpec | None) -> Tensor:
    assert isinstance(attention, AttentionSpec)
    if attention.kv_heads < attention.heads:
        return torch.cat(tuple(parts))
    heads = [part.unflatten(0, (attention.heads, -1)) for part in parts]
    return torch.cat(heads, 1).flatten(0, 1)


def _split_qkv(fused: Tensor, attention: MixerSpec | None) -> tuple[Tensor, ...]:
    assert isinstance(attention, AttentionSpec)
    number = len(attention.projections) - 1
    if attention.kv_heads < attention.heads:
        kv = attention.kv_heads * attention.head_dim
        return fused.split([len(fused) - number * kv, *[kv] * number])
    heads, width = fused.unflatten(0, (attention.heads, -1)), attention.head_dim
    return tuple(part.flatten(0, 1) for part in heads.split([heads.shape[1] - number * width, *[width] * number], 1))


COPY = Transform(lambda parts, attention: parts[0], lambda value, attention: (value,))
# Our layout: [q|k|v] of every head if queries and keys have as many heads, else all queries, all keys, all
# values. With an output gate, a head's gate follows its query, as in HuggingFace's q_proj.
QKV = Transform(_join_qkv, _split_qkv)


def _join_fused(parts: Sequence[Tensor], attention: MixerSpec | None) -> Tensor:
    assert isinstance(attention, AttentionSpec)
    query, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    return _join_qkv(parts[0].split([query, kv, kv]), attention)


# HuggingFace's tensor holds all queries, then all keys, then all values, whatever the numbers of heads.
FUSED_QKV = Transform(_join_fused, lambda value, attention: (torch.cat(_split_qkv(value, attention)),))
UP_GATE = Transform(lambda parts, attention: torch.cat(tuple(parts)), lambda value, attention: value.chunk(2))
# HuggingFace's tensor holds the gate before the up projection; ours holds it after.
GATE_UP = Transform(
    lambda parts, attention: torch.cat(parts[0].chunk(2)[::-1]),
    lambda value, attention: (torch.cat(value.chunk(2)[::-1]),),
)


@dataclass(frozen=True)
class TensorMapping:
    """One NeoX parameter and the HuggingFace tensors that it is made of.

    neox_name: the parameter's name within its layer.
    hf_names: names of the HuggingFace tensors. {} stands for the block's number, from 0; names outside blocks
        lack it. If a name has {expert}, it is the only name: each expert has such a tensor, and the parameter
        stacks them along dimension 0.
    transform: converts the tensors.
    transposed: the HuggingFace tensors are `[in, out]`, as in GPT-2.
    stacked: the HuggingFace tensor holds all experts, `[experts, ...]`; `transposed` is then about each
        expert's matrix.
    part: (i, n): the HuggingFace tensor interleaves n NeoX parameters along its last dimension; this
        parameter is number i.
    consecutive: the HuggingFace tensor holds the n parameters of `part` one after the other along dimension
        1 instead.
    """

    neox_name: str
    hf_names: tuple[str, ...]
    transform: Transform = COPY
    transposed: bool = False
    stacked: bool = False
    part: tuple[int, int] = (0, 1)
    consecutive: bool = False

    def for_mixer(self, mixer: MixerSpec | None) -> "TensorMapping":
        """Returns the mapping in a layer with this mixer: without v_proj if keys are values."""
        if self.transform is not QKV or not isinstance(mixer, AttentionSpec):
            return self
        return replace(self, hf_names=self.hf_names[: len(mixer.projections)])

    @property
    def is_block_parameter(self) -> bool:
        """Whether the NeoX parameter belongs to a block, not to a layer before or after the blocks."""
        return "{}" in self.hf_names[0]

    @property
    def is_per_expert(self) -> bool:
        """Whether each expert has its own HuggingFace tensor."""
        return "{expert}" in self.hf_names[0]

    @property
    def holds_all_experts(self) -> bool:
        """Whether the NeoX parameter holds all experts of a block, however HuggingFace stores them."""
        return self.is_per_expert or self.stacked

    def names(self, block: int, experts: int | None) -> list[str]:
        """Returns the HuggingFace tensor names for block number `block`.

        experts: number of the block's experts; None: the block is dense."""
        numbers = range(experts or 1) if self.is_per_expert else (0,)
        return [name.format(block, expert=expert) for expert in numbers for name in self.hf_names]

    def join(self, parts: Iterable[Tensor], attention: MixerSpec | None, experts: int | None) -> Tensor:
        """Makes the NeoX parameter from HuggingFace's tensors; experts are read one at a time.

        parts: the HuggingFace tensors in the order of `names`. attention: the spec of the layer's mixer.
            experts: number of experts; None: the block is dense."""
        if self.stacked:
            stored, (i, number) = next(iter(parts)), self.part
            part = stored.chunk(number, 1)[i] if self.consecutive else stored[..., i::number]
            return self._turned(part).flatten(0, 1)
        foreign = (part.t() for part in parts) if self.transposed else parts
        if self.is_per_expert:
            return _stacked(foreign, experts or 1)
        return self.transform.join(list(foreign), attention)

    def split(self, value: Tensor, attention: MixerSpec | None, experts: int | None) -> tuple[Tensor, ...]:
        """Returns the HuggingFace tensors of the NeoX parameter `value`, the inverse of `join`.

        If `part` is set, returns only this parameter's part of the HuggingFace tensor; `merge` combines the
        parts."""
        if self.stacked:
            return (self._turned(value.unflatten(0, (experts or 1, -1))),)
        parts = value.chunk(experts or 1) if self.is_per_expert else self.transform.split(value, attention)
        return tuple(part.t() for part in parts) if self.transposed else tuple(parts)

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """Combines several parameters into the HuggingFace tensor that holds them.

        parts: results of `split`, in the order of `part`."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat(tuple(parts), 1) if self.consecutive else torch.stack(tuple(parts), -1).flatten(-2)

    def _turned(self, experts: Tensor) -> Tensor:
        return experts.transpose(1, 2) if self.transposed else experts


def _stacked(parts: Iterable[Tensor], number: int) -> Tensor:
    """Concatenates `number` tensors of equal shape along dimension 0; reads one at a time.

    Raises CheckpointError if their dtypes differ."""
    value = None
    for i, part in enumerate(parts):
        if value is None:
            value = part.new_empty((number, *part.shape))
        if part.dtype != value.dtype:
            raise CheckpointError(
                f"experts of one block have dtypes {value.dtype} and {part.dtype}; convert all to one dtype"
            )
        value[i] = part
    assert value is not None
    return value.flatten(0, 1)


def weight_and_bias(
    neox_name: str, *hf_names: str, transform: Transform = COPY, transposed: bool = False
) -> tuple[TensorMapping, TensorMapping]:
    """Returns the mappings of the weight and the bias of a linear layer or layernorm.

    neox_name, hf_names: names of the layer, without `.weight` and `.bias`."""
    return (
        TensorMapping(f"{neox_name}.weight", tuple(f"{name}.weight" for name in hf_names), transform, transposed),
        TensorMapping(f"{neox_name}.bias", tuple(f"{name}.bias" for name in hf_names), transform),
    )


_BLOCK = "model.layers.{}."
# The layers around a block for multi-token prediction (DeepSeek V3, GLM 4.5). Its other rows are a block's.
PREDICTION_ROWS = (
    TensorMapping("enorm.scale", (_BLOCK + "enorm.weight",)),
    TensorMapping("hnorm.scale", (_BLOCK + "hnorm.weight",)),
    TensorMapping("eh_proj.weight", (_BLOCK + "eh_proj.weight",)),
    TensorMapping("final_layernorm.scale", (_BLOCK + "shared_head.norm.weight",)),
)
# Files hold a copy of embedding and head for each such block, by our name of what is copied.
PREDICTION_COPIES = {
    "word_embeddings.weight": _BLOCK + "embed_tokens.weight",
    "final_linear.weight": _BLOCK + "shared_head.head.weight",
}
# Qwen's files hold one such block, without copies: the names of a further block, and those in the files.
_MTP_NAMES = {
    _BLOCK + "enorm.": "mtp.pre_fc_norm_embedding.",
    _BLOCK + "hnorm.": "mtp.pre_fc_norm_hidden.",
    _BLOCK + "eh_proj.": "mtp.fc.",
    _BLOCK + "shared_head.norm.": "mtp.norm.",
    _BLOCK: "mtp.layers.0.",
}
# The head of every class for sequence classification.
SCORE = TensorMapping("rm_linear.weight", ("score.weight",))


@dataclass(frozen=True)
class Family:
    """A family of HuggingFace models: its names, its tensors, and the conversion of its config.json.

    model_type, architecture: as in config.json of the family's language models.
    scorer: the architecture of reward models, if its name does not follow from `architecture`.
    has_scorer: transformers has a class for reward models of the family.
    rows: tensor mappings of all parameters; a model uses the rows of the parameters it has.
    ignored: a regular expression for HuggingFace tensors without trained values.
    carried: a regular expression for tensors that NeoX models lack. They are copied unchanged from import to
        export. None: there are none.
    predicts_more: files may hold blocks after the last, for multi-token prediction, which are read and
        written only with `mtp_num_layers`.
    has_mtp_block: the same, but files hold one block, as `mtp.layers.0`, without copies. It is also
        `carried`, for models without `mtp_num_layers`.
    needs_bos: transformers refuses null as bos_token_id, so exports without such a token leave it out.
    base_prefix: prefix of names in the class with a head; files of the class without a head lack it.
    in_memory: maps names in transformers 5's memory to the names in files, where they differ. The tensors of
        several names, or of all experts ({expert}), are one tensor in memory.
    constants: HuggingFace tensors of every block that are never trained, and the value of all their elements.
        They are written on export; an import with another value is refused.
    unread: fields of published files that neither transformers nor we read, though other families do; they
        may have types of their own.
    typical: fields of config.json for a small model of the family, where transformers' defaults give no model
        that is supported.
    title: the family's usual name.
    notes: differences from the published model, or special cases, for the table in docs/huggingface.md.

    to_keys: converts config.json (of any version of transformers, defaults left out) to NeoX configuration
        keys, without the vocabulary.
    to_config: converts NeoX configuration keys to config.json, without model_type, architectures and the
        vocabulary. It may drop settings that the family cannot express, because the result is converted back
        and compared.
    Both raise CheckpointError for settings without a counterpart.
    """

    model_type: str
    architecture: str
    rows: tuple[TensorMapping, ...]
    to_keys: Callable[[Config], dict[str, Any]]
    to_config: Callable[[NeoXArgs], dict[str, Any]]
    ignored: str = r".*rotary_emb\.inv_freq"
    carried: str | None = None
    scorer: str | None = None
    has_scorer: bool = True
    predicts_more: bool = False
    has_mtp_block: bool = False
    needs_bos: bool = False
    base_prefix: str = "model."
    in_memory: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    typical: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    notes: str = ""

    def stored_names(self, name: str, experts: int) -> list[list[str]]:
        """Returns the names in files of a tensor whose name in transformers 5's memory is `name` and differs.

        The result has a list of names for each expert if the tensor stacks experts, else one list."""
        block, foreign = re.search(r"\.(\d+)\.", name), self._foreign(name)
        if self.predicts(name):
            foreign = tuple(pattern.replace(_BLOCK, _MTP_NAMES[_BLOCK]) for pattern in foreign)
        numbers = range(experts) if self.stacks_experts(name) else (0,)
        return [[pattern.format(block and block[1], expert=expert) for pattern in foreign] for expert in numbers]

    def memory_name(self, name: str) -> str:
        """Converts a tensor's name in files to its name in transformers 5's memory.

        Both names have {} in place of the block's number."""
        return next((in_memory for in_memory, stored in self.in_memory.items() if stored == (name,)), name)

    def stacks_experts(self, name: str) -> bool:
        """Whether the tensor `name` in memory holds all experts of a block, which files store separately."""
        return any("{expert}" in pattern for pattern in self._foreign(name))

    def _foreign(self, name: str) -> tuple[str, ...]:
        general = name.replace(_MTP_NAMES[_BLOCK], _BLOCK) if self.predicts(name) else name
        return self.in_memory.get(re.sub(r"\.\d+\.", ".{}.", general, count=1), ())

    @property
    def has_experts(self) -> bool:
        """Whether the family has blocks with experts."""
        return any(row.holds_all_experts for row in self.rows)

    @property
    def has_states(self) -> bool:
        """Whether the family has blocks with states."""
        return any(row.neox_name.startswith("mixer.") for row in self.rows)

    def carries(self, name: str) -> bool:
        """Whether NeoX models lack the HuggingFace tensor `name`; it is then copied unchanged (`carried`)."""
        return self.carried is not None and re.fullmatch(self.carried, name) is not None

    def leaves_out(self, name: str, blocks: int) -> bool:
        """Whether the HuggingFace tensor `name` is of block number `blocks` or later, which are not read
        (`predicts_more`)."""
        block = re.match(r"(?:model\.)?layers\.(\d+)\.", name) if self.predicts_more else None
        return block is not None and int(block[1]) >= blocks

    def prediction_blocks(self, args: ModelArgs) -> range:
        """Returns the numbers of the blocks for multi-token prediction that files of this model hold."""
        number = args.mtp_num_layers or 0
        is_stored = self.predicts_more or (self.has_mtp_block and number == 1)
        return range(args.num_layers, args.num_layers + number) if is_stored else range(0)

    def predicts(self, name: str) -> bool:
        """Whether the tensor `name` in files is of a block with `has_mtp_block`."""
        return self.has_mtp_block and name.startswith(tuple(_MTP_NAMES.values()))

    def file_name(self, name: str, blocks: int) -> str:
        """Converts a tensor's name, as of a block after `blocks` others, to its name in files with
        `has_mtp_block`."""
        for further, mtp_name in _MTP_NAMES.items() if self.has_mtp_block else ():
            if name.startswith(prefix := further.format(blocks)):
                return mtp_name + name.removeprefix(prefix)
        return name

    def copy_of(self, name: str) -> str | None:
        """Returns our name of the weight that the tensor `name` copies for multi-token prediction; None if it
        is no such copy."""
        general = "model." + re.sub(r"(?<=layers\.)\d+(?=\.)", "{}", name.removeprefix("model."), count=1)
        copies = PREDICTION_COPIES.items() if self.predicts_more else ()
        return next((neox_name for neox_name, hf_name in copies if hf_name == general), None)

    @property
    def head(self) -> str:
        """HuggingFace's name of the output layer's weight."""
        return next(row.hf_names[0] for row in self.rows if row.neox_name == "final_linear.weight")
