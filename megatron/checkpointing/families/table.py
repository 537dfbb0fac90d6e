"""What a family of HuggingFace models is: a table of its tensor names, and the translation of its config.json.

A row says which foreign tensors one of our parameters is made of, and how: `join` makes ours, `split` undoes it bit for
bit. Shapes, tensor-parallel cuts and initial values of our side stand in `model.weight_map`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.neox_arguments import NeoXArgs

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Transform:
    """join: whole foreign tensors, in the order of the row, to one of ours; split: its inverse."""

    join: Callable[[Sequence[Tensor], NeoXArgs], Tensor]
    split: Callable[[Tensor, NeoXArgs], tuple[Tensor, ...]]


def _join_qkv(parts: Sequence[Tensor], args: NeoXArgs) -> Tensor:
    if args.kv_heads < args.num_attention_heads:
        return torch.cat(tuple(parts))
    heads = [part.unflatten(0, (args.num_attention_heads, args.head_dim)) for part in parts]
    return torch.stack(heads, 1).flatten(0, 2)


def _split_qkv(whole: Tensor, args: NeoXArgs) -> tuple[Tensor, ...]:
    if args.kv_heads < args.num_attention_heads:
        query, kv = args.num_attention_heads * args.head_dim, args.kv_heads * args.head_dim
        return whole.split([query, kv, kv])
    heads = whole.unflatten(0, (args.num_attention_heads, 3, args.head_dim))
    return tuple(part.flatten(0, 1) for part in heads.unbind(1))


COPY = Transform(lambda parts, args: parts[0], lambda whole, args: (whole,))
# Ours are [q|k|v] of every head where queries and keys have as many heads, else all queries, all keys, all values.
QKV = Transform(_join_qkv, _split_qkv)
UP_GATE = Transform(lambda parts, args: torch.cat(tuple(parts)), lambda whole, args: whole.chunk(2))


@dataclass(frozen=True)
class Row:
    """ours: name in a layer of the weight map; theirs: foreign names, {} stands for the block's number from 0."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = COPY


def both(ours: str, *theirs: str, transform: Transform = COPY) -> tuple[Row, Row]:
    """The rows of a linear's (or layernorm's) weight and bias."""
    weight, bias = (
        Row(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), transform) for kind in ("weight", "bias")
    )
    return weight, bias


@dataclass(frozen=True)
class Family:
    """model_type, architecture: as in config.json. rows: of all layers; those that a model has no parameter for are
    left out. ignored: a regular expression of foreign tensors that hold nothing trained.

    to_keys: config.json (of any version of transformers, defaults left out) to our keys, without the vocabulary.
    to_config: ours to config.json without model_type, architectures and the vocabulary; it may drop what the family
    cannot say, since the result is translated back and compared.
    Both raise CheckpointError for what has no counterpart.
    """

    model_type: str
    architecture: str
    rows: tuple[Row, ...]
    to_keys: Callable[[Config], dict[str, Any]]
    to_config: Callable[[NeoXArgs], dict[str, Any]]
    ignored: str = r".*rotary_emb\.inv_freq"
