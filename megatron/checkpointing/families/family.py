"""What a family of HuggingFace models is: a table of its tensor names, and the translation of its
config.json.

A `TensorMapping` says which foreign tensors one of our parameters is made of, and how: `join` makes ours,
`split` undoes it bit for bit. Shapes, tensor-parallel splits and initial values of our parameters stand in
`model.weight_map`. The families that there are stand in `convert.FAMILIES`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
UP_GATE = Transform(lambda parts, attention: torch.cat(tuple(parts)), lambda whole, attention: whole.chunk(2))


@dataclass(frozen=True)
class TensorMapping:
    """One of our parameters and the foreign tensors that it is made of.

    ours: its name within a layer of the weight map. theirs: names of the foreign tensors, in which {} stands
    for the number of the block, counted from 0.
    """

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = COPY


def weight_and_bias(ours: str, *theirs: str, transform: Transform = COPY) -> tuple[TensorMapping, TensorMapping]:
    """The mappings of the weight and of the bias of a linear layer or layernorm; names without `.weight`,
    `.bias`."""
    weight, bias = (
        TensorMapping(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), transform)
        for kind in ("weight", "bias")
    )
    return weight, bias


# The head of every class for sequence classification.
SCORE = TensorMapping("rm_linear.weight", ("score.weight",))


@dataclass(frozen=True)
class Family:
    """A family of HuggingFace models.

    model_type, architecture: as in config.json, of language models; scorer: the architecture of reward
    models, where it is not called as these are. rows: the tensor mappings of all layers; those that a model
    has no parameter for are not used. ignored: a regular expression of foreign tensors without trained
    values.

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
