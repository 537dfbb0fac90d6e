"""Foreign parameter names, in one table, and the few tensors whose rows other writers order differently.

Ours are GPT-NeoX's current names. Read besides: NeoX before mid-2024 (Pythia, 20B), its llama conversions
(w1, w2, w3), wrapped norms (apex), and Transformer-Engine naming (te_mha, te_layernorm_mlp; the geodesic fork).
Written: NeoX's current names, or Transformer-Engine's where te_mha, te_layernorm_mlp or a te_ norm asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.model.weight_map import unused_params
from megatron.neox_arguments import NeoXArgs

Pairs = tuple[tuple[str, str], ...]
# ours -> Transformer-Engine's, by beginning; the first that fits is used
_TE_MHA: Pairs = (("attention.query_key_value.", "attention.qkv."), ("attention.dense.", "attention.proj."))
_TE_MLP: Pairs = (
    ("post_attention_layernorm.scale", "mlp.layer_norm_weight"),  # the norm before the MLP is part of it
    ("post_attention_layernorm.", "mlp.layer_norm_"),
    ("mlp.linear1.", "mlp.fc1_"),
    ("mlp.linear2.", "mlp.fc2_"),
)
_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm", "norm",
)  # fmt: skip
_TE_NORMS: Pairs = tuple(
    pair for norm in _NORMS for pair in ((f"{norm}.scale", f"{norm}.norm.weight"), (f"{norm}.", f"{norm}.norm."))
)
# foreign beginning -> ours; the first that fits is used
_RENAMES: Pairs = (
    *((foreign, ours) for ours, foreign in (*_TE_MHA, *_TE_MLP[1:])),
    ("mlp.dense_h_to_4h.", "mlp.linear1."),  # NeoX before mid-2024
    ("mlp.dense_4h_to_h.", "mlp.linear2."),
    ("mlp.w2.", "mlp.linear2."),  # llama conversions of that time
    *((f"{norm}.norm.", f"{norm}.") for norm in _NORMS),  # norms wrapped in a module
)
# Buffers and blobs that hold nothing trained.
_IGNORED = re.compile(
    r".*_extra_state|attention\.(masked_)?bias|attention\.rotary_emb(eddings)?\..*|(attention\.)?alibi_embed\..*"
    r"|rotary_emb\..*"
)


# The first whose mark is in a block's names.
_GENERATIONS: Pairs = (
    ("attention.qkv.", "Transformer-Engine's"),
    ("mlp.fc1_", "Transformer-Engine's"),
    ("mlp.dense_h_to_4h.", "GPT-NeoX's before mid-2024 (dense_h_to_4h)"),
    ("mlp.w1.", "of llama conversions (w1, w2, w3)"),
    ("post_feedforward_layernorm.", "of the geodesic fork's OLMo"),
)


def generation(names: Collection[str]) -> str:
    """Whose names a block's tensors have, in words."""
    found = (whose for mark, whose in _GENERATIONS if any(name.startswith(mark) for name in names))
    return next(found, "GPT-NeoX's (linear1, linear2)")


def our_name(name: str, expected: Collection[str]) -> str | None:
    """Our name of a foreign one; the name itself when it is already ours or unknown; None for what is left out."""
    if _IGNORED.fullmatch(name):
        return None
    name = _renamed(name, _RENAMES)
    scale = name.removesuffix(".weight") + ".scale"  # wrapped and TE RMSNorms say weight where NeoX says scale
    return scale if name not in expected and scale in expected else name


def _renamed(name: str, table: Pairs) -> str:
    for old, new in table:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def to_our_names(
    tensors: Mapping[str, Tensor], expected: Collection[str], args: NeoXArgs, where: str
) -> dict[str, Tensor]:
    """One layer of one tensor rank under our names, its rows in our order.

    expected: our names of that layer.
    Raises CheckpointError for two names of one tensor, and for trained values of a norm that gpt_j_tied leaves out.
    """
    tensors = dict(tensors)
    out: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        up, gate = f"mlp.w3.{kind}", f"mlp.w1.{kind}"
        if up in tensors and gate in tensors:
            out[f"mlp.linear1.{kind}"] = torch.cat([tensors.pop(up), tensors.pop(gate)])
    unused = {spec.name: spec for spec in unused_params(args)}
    for name, tensor in tensors.items():
        ours = our_name(name, {*expected, *unused})
        if ours is None:
            continue
        if ours in unused and ours not in expected:
            if args.gpt_j_tied and not torch.all(tensor == float(unused[ours].init == "ones")):
                raise CheckpointError(f"{where}: {name} is trained, so the model was not tied; set gpt_j_tied: false")
            continue
        if ours in out:
            raise CheckpointError(f"{where}: {name} and another tensor both stand for {ours}; remove one of them")
        if name.startswith("attention.qkv."):
            tensor = _groups_apart(tensor, args)
        elif name.startswith("mlp.fc1_"):
            tensor = _halves_swapped(tensor, args)
        out[ours] = tensor
    return out


def to_file_names(tensors: Mapping[str, Tensor], args: NeoXArgs) -> dict[str, Tensor]:
    """One layer of one tensor rank as GPT-NeoX writes it: its names for this configuration, unused norms, buffers."""
    table = (
        *(_TE_MHA if args.te_mha else ()),
        *(_TE_MLP if args.te_layernorm_mlp else ()),
        *(_TE_NORMS if args.norm.startswith("te_") else ()),
    )
    tensors = dict(tensors)
    like = tensors.get("attention.query_key_value.weight")  # None outside blocks
    if like is not None:
        for spec in unused_params(args):
            tensors[spec.name] = torch.full(spec.shape, float(spec.init == "ones"), dtype=like.dtype)
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if args.te_mha and name.startswith("attention.query_key_value."):
            tensor = _groups_together(tensor, args)
        elif args.te_layernorm_mlp and name.startswith("mlp.linear1."):
            tensor = _halves_swapped(tensor, args)
        out[_renamed(name, table)] = tensor
    if like is not None and args.rotary_save_freqs_buffer and args.pos_emb == "rotary":
        width = int(args.head_dim * args.rotary_pct) // 2 * 2
        exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
        module = "rotary_embeddings" if args.te_mha else "rotary_emb"
        # DeepSpeed casts NeoX's buffers with the weights.
        out[f"attention.{module}.inv_freq"] = (1.0 / args.rotary_emb_base**exponent).to(like.dtype)
    return out


# Transformer-Engine's MultiheadAttention views its rows as `[kv_heads, queries of one + 2, head_dim]`
# (qkv_weight_interleaved, its default): the queries of a key-value head, its key, its value. Ours are all queries, all
# keys, all values of a rank. With one query a key-value head both are NeoX's [q|k|v] per head.


def _groups_apart(qkv: Tensor, args: NeoXArgs) -> Tensor:
    queries = args.num_attention_heads // args.kv_heads
    if queries == 1:
        return qkv
    groups = qkv.unflatten(0, (-1, queries + 2, args.head_dim))
    return torch.cat([part.flatten(0, 2) for part in groups.split([queries, 1, 1], 1)])


def _groups_together(qkv: Tensor, args: NeoXArgs) -> Tensor:
    queries = args.num_attention_heads // args.kv_heads
    if queries == 1:
        return qkv
    kv = len(qkv) // (queries + 2)
    parts = qkv.split([queries * kv, kv, kv])
    return torch.cat([part.unflatten(0, (kv // args.head_dim, -1, args.head_dim)) for part in parts], 1).flatten(0, 2)


def _halves_swapped(linear1: Tensor, args: NeoXArgs) -> Tensor:
    """Between NeoX's [up; gate] and Transformer-Engine's [gate; up]: its tests apply the activation to the first half
    of fc1's output and multiply by the second."""
    return torch.cat(linear1.chunk(2)[::-1]) if args.is_gated else linear1
