"""The one weight map: every parameter's name, full shape, sharding and initialisation.

Initialisation, saving, loading, conversion and resharding read this table; names are those of GPT-NeoX's per-layer
checkpoint files (layer 0 embedding, 2..N+1 blocks, N+3 final norm, N+4 untied head; N+4 holds no parameter when tied).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.neox_arguments import NeoXArgs


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of one layer.

    shape: of the whole parameter, over all tensor ranks.
    axis: the dimension cut over tensor ranks, None when every rank holds a copy.
    blocks: sizes along `axis`, each cut over the ranks on its own ([q, k, v] of GQA, [up, gate] of gated MLPs).
    init: "embedding", "input" (init_method), "output" (output_layer_init_method), "xavier_normal", "ones" or "zeros".
    sum_over_tensor: on disk each tensor rank holds a part and the parts sum to the effective value.
    weight_decay: False for norms and biases.
    shared: one parameter of all blocks, of which each block's file holds a copy.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    blocks: tuple[int, ...] = ()
    init: str = "zeros"
    sum_over_tensor: bool = False
    weight_decay: bool = False
    shared: bool = False

    def local_shape(self, tensor_size: int) -> tuple[int, ...]:
        """Shape of one tensor rank's part."""
        if self.axis is None:
            return self.shape
        return tuple(n // tensor_size if i == self.axis else n for i, n in enumerate(self.shape))


def norm_kind(args: NeoXArgs) -> str:
    """`norm` without what only says under which names it stands on disk."""
    return args.norm.removeprefix("te_")


def has_norm_bias(args: NeoXArgs) -> bool:
    return norm_kind(args) == "layernorm" and (args.use_bias_in_norms or args.compat_norm_bias)


def is_tied(args: NeoXArgs) -> bool:
    """Whether attention and MLP read one norm. Transformer-Engine's MLP has its own, also in GPT-NeoX."""
    return args.gpt_j_residual and args.gpt_j_tied and not args.te_layernorm_mlp


def _gain(args: NeoXArgs) -> str:
    """How RMSNorm's weights start."""
    return "zeros" if args.zero_centered_gamma else "ones"


def _norm(args: NeoXArgs, name: str) -> list[ParamSpec]:
    kind, hidden = norm_kind(args), (args.hidden_size,)
    if kind == "layernorm":
        bias = [ParamSpec(f"{name}.bias", hidden)] if has_norm_bias(args) else []
        return [ParamSpec(f"{name}.weight", hidden, init="ones"), *bias]
    if kind == "rmsnorm":
        return [ParamSpec(f"{name}.scale", hidden, init=_gain(args))]
    return [ParamSpec(f"{name}.g", (1,), init="ones")] if kind == "scalenorm" else []


def _query_key_norms(args: NeoXArgs) -> list[ParamSpec]:
    heads, kv = args.num_attention_heads, args.kv_heads * args.head_dim
    if not args.use_qk_layernorm:
        return []
    if args.use_separate_qk_norms and args.qk_norm_per_head:
        names = ("attention.q_norm.scale", "attention.k_norm.scale")
        return [ParamSpec(name, (args.head_dim,), init=_gain(args)) for name in names]
    if args.use_separate_qk_norms:
        widths = {"attention.q_norm.scale": heads * args.head_dim, "attention.k_norm.scale": kv}
        return [ParamSpec(name, (width,), 0, (width,), _gain(args)) for name, width in widths.items()]
    name = "attention.qk_layernorm." + ("scale" if norm_kind(args) == "rmsnorm" else "weight")
    found = [ParamSpec(name, (heads, args.head_dim), 0, (heads,), _gain(args))]
    if has_norm_bias(args):
        found.append(ParamSpec("attention.qk_layernorm.bias", (heads, args.head_dim), 0, (heads,)))
    return found


def _column(name: str, out: int, inp: int, bias: bool, blocks: Sequence[int] = ()) -> list[ParamSpec]:
    parts = tuple(blocks) or (out,)
    specs = [ParamSpec(f"{name}.weight", (out, inp), 0, parts, "input", weight_decay=True)]
    if bias:
        specs.append(ParamSpec(f"{name}.bias", (out,), 0, parts))
    return specs


def _row(args: NeoXArgs, name: str, out: int, inp: int, bias: bool) -> list[ParamSpec]:
    specs = [ParamSpec(f"{name}.weight", (out, inp), 1, (inp,), "output", weight_decay=True)]
    if bias:
        specs.append(ParamSpec(f"{name}.bias", (out,), sum_over_tensor=args.gpt_j_residual))
    return specs


def _relative_biases(args: NeoXArgs) -> list[ParamSpec]:
    if args.pos_emb != "rpe":
        return []
    heads = args.num_attention_heads
    shape, init = (args.rpe_num_buckets, heads), "xavier_normal"
    return [ParamSpec("attention.rpe.weight", shape, 1, (heads,), init, weight_decay=True, shared=True)]


def block_params(args: NeoXArgs) -> tuple[ParamSpec, ...]:
    """Parameters of one transformer block, in NeoX's registration order."""
    hidden, head_dim = args.hidden_size, args.head_dim
    query, kv = args.num_attention_heads * head_dim, args.kv_heads * head_dim
    # MHA rows are [q|k|v] per head, so a contiguous cut gives a rank its heads; GQA rows are [Q|K|V] per rank.
    qkv_blocks = (3 * query,) if args.kv_heads == args.num_attention_heads else (query, kv, kv)
    ffn = args.ffn_size
    ffn_blocks = (ffn, ffn) if args.is_gated else (ffn,)
    placement = args.norm_placement
    return (
        *([] if placement == "olmo3" else _norm(args, "input_layernorm")),
        *_query_key_norms(args),
        *_column("attention.query_key_value", sum(qkv_blocks), hidden, args.use_bias_in_attn_linear, qkv_blocks),
        *_relative_biases(args),
        *_row(args, "attention.dense", hidden, query, args.use_bias_in_attn_linear),
        *([] if is_tied(args) else _norm(args, "post_attention_layernorm")),
        *(_norm(args, "pre_feedforward_layernorm") if placement == "sandwich" else []),
        *(_norm(args, "post_feedforward_layernorm") if placement in ("olmo3", "sandwich") else []),
        *_column("mlp.linear1", sum(ffn_blocks), hidden, args.use_bias_in_mlp, ffn_blocks),
        *_row(args, "mlp.linear2", hidden, ffn, args.use_bias_in_mlp),
    )


def unused_params(args: NeoXArgs) -> tuple[ParamSpec, ...]:
    """Norms of a block that GPT-NeoX makes and saves, though nothing reads them: its files hold their first values."""
    if is_tied(args):
        return tuple(_norm(args, "post_attention_layernorm"))
    return tuple(_norm(args, "input_layernorm")) if args.norm_placement == "olmo3" else ()


def layer_params(args: NeoXArgs) -> dict[int, tuple[ParamSpec, ...]]:
    """All layers that own parameters, by NeoX layer index. `args.padded_vocab_size` must be known."""
    vocab, hidden, last = args.padded_vocab_size, args.hidden_size, args.num_layers + 1
    if vocab is None:
        raise ValueError("padded_vocab_size is not known yet: build the tokenizer first")
    embedding = [ParamSpec("word_embeddings.weight", (vocab, hidden), 0, (vocab,), "embedding", weight_decay=True)]
    if args.pos_emb == "learned":
        positions = (args.max_position_embeddings, hidden)
        embedding.append(ParamSpec("position_embeddings.weight", positions, init="embedding", weight_decay=True))
    layers: dict[int, tuple[ParamSpec, ...]] = {0: tuple(embedding)}
    for index in range(2, last + 1):
        layers[index] = block_params(args)
    layers[last + 2] = tuple(_norm(args, "norm"))
    if args.no_weight_tying:
        layers[last + 3] = tuple(_column("final_linear", vocab, hidden, False))
    return layers


def shard(full: Tensor, spec: ParamSpec, rank: int, size: int) -> Tensor:
    """Tensor rank `rank`'s part of a whole parameter (a view where possible)."""
    if spec.axis is None or size == 1:
        return full
    parts = [block.chunk(size, spec.axis)[rank] for block in full.split(spec.blocks, spec.axis)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, spec.axis)


def unshard(shards: Sequence[Tensor], spec: ParamSpec) -> Tensor:
    """The whole parameter from the parts of all tensor ranks, in rank order."""
    if spec.axis is None or len(shards) == 1:
        return shards[0]
    sizes = [n // len(shards) for n in spec.blocks]
    blocks = zip(*(part.split(sizes, spec.axis) for part in shards), strict=True)
    return torch.cat([piece for block in blocks for piece in block], spec.axis)
