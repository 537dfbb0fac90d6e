"""What a family of HuggingFace models is: a table of its tensor names, and the translation of its
config.json.

A `TensorMapping` says which foreign tensors one of our parameters is made of, and how: `join` makes ours,
`split` undoes it bit for bit. Shapes, tensor-parallel splits and initial values of our parameters stand in
`model.weight_map`. The families that there are stand in `registry.FAMILIES`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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

    ours: its name within a layer of the weight map. theirs: names of the foreign tensors, in which {} stands
    for the number of the block, counted from 0. transposed: these are `[in, out]`, as GPT-2's.
    """

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = COPY
    transposed: bool = False

    def join(self, parts: Sequence[Tensor], attention: AttentionSpec | None) -> Tensor:
        """Our tensor from the foreign ones. attention: as of `Transform`."""
        return self.transform.join([part.t() for part in parts] if self.transposed else parts, attention)

    def split(self, whole: Tensor, attention: AttentionSpec | None) -> tuple[Tensor, ...]:
        """The inverse of `join`."""
        parts = self.transform.split(whole, attention)
        return tuple(part.t() for part in parts) if self.transposed else parts


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
    foreign tensors without trained values.

    base_prefix: what names begin with in the class with a head, and lack in files of the class without one.
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
    scorer: str | None = None
    has_scorer: bool = True
    base_prefix: str = "model."
    constants: Mapping[str, float] = field(default_factory=dict)
    title: str = ""
    notes: str = ""

    @property
    def head(self) -> str:
        """The name of the output layer's weight."""
        return next(row.theirs[0] for row in self.rows if row.ours == "final_linear.weight")
