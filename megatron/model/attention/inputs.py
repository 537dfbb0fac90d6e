"""What the attention of blocks is given, and in what it may differ."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron.model.positions import Rope
from megatron.model.specs import attention_spec
from megatron.neox_arguments import NeoXArgs


class AttentionInputs(NamedTuple):
    """What the attention of all blocks of one `LayerKind` shares for one micro-batch, made once a stage.

    rope: tables of `positions.rope_tables`, None without rotary positions.
    mask: additive or boolean `[batch or 1, heads or 1, seq, keys]`; None means plainly causal.
    cu_seqlens: int32 document starts over the flattened batch and its end, where `Backends.takes_documents`.
    window: with cu_seqlens, how many keys before itself a query sees; -1: all.
    columns: `[batch, seq]`, where in a cache these tokens go; None in training and for a text's beginning.
    """

    rope: Rope | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    window: int = -1
    columns: Tensor | None = None


def has_bias(args: NeoXArgs) -> bool:
    """Whether positions are added to attention logits, which makes every call one with a mask."""
    return args.pos_emb in ("alibi", "rpe")


def sliding_window(args: NeoXArgs) -> int | None:
    """Keys before itself that a query sees: flash attention's `window_size=(W, 0)`, so W + 1 keys with its own.

    Transformers' `sliding_window` counts the token itself: W + 1 there is W here. None when all of the longest
    sequence is seen. `layer_types` may say that it holds for some layers alone.
    """
    width = args.sliding_window_width
    return width if width is not None and width < args.max_position_embeddings - 1 else None


class LayerKind(NamedTuple):
    """In what the attention of blocks may differ. window: as `sliding_window`; rotary: whether it turns queries and
    keys; local: with `rope_local_base_freq`; backend: of `AttentionSpec`."""

    window: int | None
    rotary: bool
    local: bool
    backend: str = "auto"


def layer_kind(args: NeoXArgs, layer: int) -> LayerKind:
    """Of the block with this NeoX layer index."""
    index = layer - 2
    slides = args.layer_types is None or args.layer_types[index] == "sliding_attention"
    rotary = args.pos_emb == "rotary" and (args.no_rope_layers is None or args.no_rope_layers[index] == 1)
    local = rotary and slides and args.rope_local_base_freq is not None
    return LayerKind(sliding_window(args) if slides else None, rotary, local, attention_spec(args, index).backend)
