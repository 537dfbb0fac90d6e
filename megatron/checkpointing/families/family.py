"""What a family of HuggingFace models is: a table of its tensor names, and the translation of its
config.json.

A `TensorMapping` says which foreign tensors one of our parameters is made of, and how: `join` makes ours,
`split` undoes it bit for bit. Shapes, tensor-parallel splits and initial values of our parameters stand in
`model.weight_map`. The families that there are stand in `registry.FAMILIES`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.model.specs import AttentionSpec
from megatron.neox_arguments import NeoXArgs

Config = Mapping[str, Any]
SCORES = "ForSequenceClassification"  # how the names of such classes end


def gives_score(config: Config) -> bool:
    """Whether a config.json is that of a reward model: a class for sequence classification."""
    return any(str(name).endswith(SCORES) for name in config.get("architectures") or ())


@dataclass(frozen=True)
class Transform:
    """How foreign tensors become one of ours.

    join: from whole foreign tensors, in the order of `TensorMapping.theirs`, to our tensor.
    split: its inverse.
    Both are given the attention spec of the layer, if it has one.
    """

    join: Callable[[Sequence[Tensor], AttentionSpec | None], Tensor]
    split: Callable[[Tensor, AttentionSpec | None], tuple[Tensor, ...]]


def _join_qkv(parts: Sequence[Tensor], attention: AttentionSpec | None) -> Tensor:
    assert attention is not None
    if attention.kv_heads < attention.heads:
        return torch.cat(tuple(parts))
    heads = [part.unflatten(0, (attention.heads, attention.head_dim)) for part in parts]
    return torch.stack(heads, 1).flatten(0, 2)


def _split_qkv(whole: Tensor, attention: AttentionSpec | None) -> tuple[Tensor, ...]:
    assert attention is not None
    if attention.kv_heads < attention.heads:
        query, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        return whole.split([query, kv, kv])
    heads = whole.unflatten(0, (attention.heads, 3, attention.head_dim))
    return tuple(part.flatten(0, 1) for part in heads.unbind(1))


COPY = Transform(lambda parts, attention: parts[0], lambda whole, attention: (whole,))
# Ours are [q|k|v] of every head where queries and keys have as many heads, else all queries, all keys, all
# values.
QKV = Transform(_join_qkv, _split_qkv)


def _join_fused(parts: Sequence[Tensor], attention: AttentionSpec | None) -> Tensor:
    assert attention is not None
    query, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    return _join_qkv(parts[0].split([query, kv, kv]), attention)


# All queries, all keys, all values of one tensor, whatever the numbers of heads.
FUSED_QKV = Transform(_join_fused, lambda whole, attention: (torch.cat(_split_qkv(whole, attention)),))
UP_GATE = Transform(lambda parts, attention: torch.cat(tuple(parts)), lambda whole, attention: whole.chunk(2))
# One tensor with the gate before the up projection; ours has it behind.
GATE_UP = Transform(
    lambda parts, attention: torch.cat(parts[0].chunk(2)[::-1]),
    lambda whole, attention: (torch.cat(whole.chunk(2)[::-1]),),
)


@dataclass(frozen=True)
class TensorMapping:
    """One of our parameters and the foreign tensors that it is made of.

    ours: its name within a layer of the weight map; blocks and the layers around them have rows of their own.
    theirs: names of the foreign tensors, in which {} stands for the number of the block, counted from 0; only
    those of blocks have it. Where one has {expert} for the number of an expert, it is the only one: each
    expert has such a tensor, and ours holds them one above the other. transposed: these are `[in, out]`, as
    GPT-2's. stacked: the foreign tensor is that of all experts, `[experts, ...]`, and what is transposed are
    its matrices. part: (i, n): the foreign tensor holds n of our parameters of a layer, which take turns
    along its last dimension; this is the one that begins at i.
    """

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = COPY
    transposed: bool = False
    stacked: bool = False
    part: tuple[int, int] = (0, 1)

    @property
    def of_block(self) -> bool:
        """Whether it is a parameter of blocks, not of the layers before and behind them."""
        return "{}" in self.theirs[0]

    @property
    def of_experts(self) -> bool:
        """Whether each expert has a foreign tensor of its own."""
        return "{expert}" in self.theirs[0]

    @property
    def of_all_experts(self) -> bool:
        """Whether ours is that of all experts of a block, however the foreign ones hold them."""
        return self.of_experts or self.stacked

    def names(self, block: int, experts: int | None) -> list[str]:
        """The foreign tensors of one block in their order. experts: how many it has; None: it is dense."""
        each = range(experts or 1) if self.of_experts else (0,)
        return [name.format(block, expert=expert) for expert in each for name in self.theirs]

    def join(self, parts: Iterable[Tensor], attention: AttentionSpec | None, experts: int | None) -> Tensor:
        """Our tensor from the foreign ones, of which those of experts are taken one at a time. attention: as
        of `Transform`; experts: as of `names`."""
        if self.stacked:
            return self._turned(next(iter(parts))[..., self.part[0] :: self.part[1]]).flatten(0, 1)
        foreign = (part.t() for part in parts) if self.transposed else parts
        if self.of_experts:
            return _stacked(foreign, experts or 1)
        return self.transform.join(list(foreign), attention)

    def split(self, whole: Tensor, attention: AttentionSpec | None, experts: int | None) -> tuple[Tensor, ...]:
        """The inverse of `join`; of a foreign tensor of several parameters what is ours (`merged`)."""
        if self.stacked:
            return (self._turned(whole.unflatten(0, (experts or 1, -1))),)
        of_experts = self.of_experts
        parts = whole.chunk(experts or 1) if of_experts else self.transform.split(whole, attention)
        return tuple(part.t() for part in parts) if self.transposed else tuple(parts)

    def _turned(self, experts: Tensor) -> Tensor:
        return experts.transpose(1, 2) if self.transposed else experts


def merged(parts: Sequence[Tensor]) -> Tensor:
    """A foreign tensor that holds several parameters, of what `TensorMapping.split` makes of each of them, in
    the order of their `part`."""
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts), -1).flatten(-2)


def _stacked(parts: Iterable[Tensor], number: int) -> Tensor:
    """`number` tensors of one shape one above the other; beside the result one of them is in memory. Raises
    CheckpointError where they are of several dtypes."""
    whole = None
    for i, part in enumerate(parts):
        if whole is None:
            whole = part.new_empty((number, *part.shape))
        if part.dtype != whole.dtype:
            raise CheckpointError(f"experts of a block are of {whole.dtype} and {part.dtype}; convert them to one")
        whole[i] = part
    assert whole is not None
    return whole.flatten(0, 1)


def weight_and_bias(
    ours: str, *theirs: str, transform: Transform = COPY, transposed: bool = False
) -> tuple[TensorMapping, TensorMapping]:
    """The mappings of the weight and of the bias of a linear layer or layernorm; names without `.weight`,
    `.bias`."""
    return (
        TensorMapping(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), transform, transposed),
        TensorMapping(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), transform),
    )


# The head of every class for sequence classification.
SCORE = TensorMapping("rm_linear.weight", ("score.weight",))


@dataclass(frozen=True)
class Family:
    """A family of HuggingFace models.

    model_type, architecture: as in config.json, of language models; scorer: the architecture of reward
    models, where it is not called as these are; has_scorer: transformers has one. rows: the tensor mappings
    of all layers; those that a model has no parameter for are not used. ignored: a regular expression of
    foreign tensors without trained values. carried: likewise of tensors that no layer of ours has and that
    are carried along as they are, from an import to an export; None without any.

    base_prefix: what names begin with in the class with a head, and lack in files of the class without one.
    in_memory: tensors of a block that transformers 5 names otherwise in memory than in files, with their
    names there: that of one tensor, or, with {expert}, of those of each expert, whose rows then follow one
    another in a matrix of that of all experts.
    constants: foreign tensors of every block that are never trained, and the number that all their elements
    are: they are written, and one that is otherwise is refused.
    title: what people call the family. notes: where transformers differs from the published model, or what is
    special, for the table in docs/huggingface.md.

    to_keys: config.json (of any version of transformers, defaults left out) to our keys, without the
    vocabulary.
    to_config: ours to config.json without model_type, architectures and the vocabulary; it may drop what the
    family cannot say, since the result is translated back and compared.
    Both raise CheckpointError for what has no counterpart.
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
    base_prefix: str = "model."
    in_memory: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    title: str = ""
    notes: str = ""

    def stored_names(self, name: str, experts: int) -> list[list[str]]:
        """The tensors in files that one of a model in memory is made of, if it is called otherwise there: of
        each expert in turn, or of itself. experts: how many there are."""
        block, foreign = re.search(r"\.(\d+)\.", name), self._foreign(name)
        each = range(experts) if self.stacks_experts(name) else (0,)
        return [[one.format(block and block[1], expert=expert) for one in foreign] for expert in each]

    def memory_name(self, name: str) -> str:
        """The name that a tensor of files has in a model in memory; both with {} for the number of the
        block."""
        return next((own for own, stored in self.in_memory.items() if stored == (name,)), name)

    def stacks_experts(self, name: str) -> bool:
        """Whether a tensor of a model in memory is that of all experts of a block, each of which has some in
        files."""
        return any("{expert}" in one for one in self._foreign(name))

    def _foreign(self, name: str) -> tuple[str, ...]:
        return self.in_memory.get(re.sub(r"\.\d+\.", ".{}.", name, count=1), ())

    @property
    def has_experts(self) -> bool:
        """Whether blocks may be mixtures of experts."""
        return any(row.of_all_experts for row in self.rows)

    @property
    def has_states(self) -> bool:
        """Whether blocks may be Mamba's, with a state."""
        return any(row.ours.startswith("mixer.") for row in self.rows)

    def carries(self, name: str) -> bool:
        """Whether a foreign tensor is one of those `carried`."""
        return self.carried is not None and re.fullmatch(self.carried, name) is not None

    @property
    def head(self) -> str:
        """The name of the output layer's weight."""
        return next(row.theirs[0] for row in self.rows if row.ours == "final_linear.weight")
