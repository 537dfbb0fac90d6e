"""Parameter names of other writers, in one table, and the few tensors whose rows they order differently.

Our names are GPT-NeoX's current names, to which the geodesic fork's OLMo adds norms. Read besides, and
written on request: NeoX before mid-2024 (Pythia, 20B), its llama conversions (w1, w2, w3), and
Transformer-Engine naming (te_mha, te_layernorm_mlp; the geodesic fork). Wrapped norms (apex) are read.
"""

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.model.specs import AttentionSpec, has_one_norm, rotary_spec
from megatron.model.weight_map import attention_of, unused_params
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.weight_names import WEIGHT_NAMINGS

Pairs = tuple[tuple[str, str], ...]
_OLMO = "of the geodesic fork's OLMo"
# our prefix -> foreign prefix; the first that matches is used
_TE_MHA: Pairs = (("attention.query_key_value.", "attention.qkv."), ("attention.dense.", "attention.proj."))
_MLP: Mapping[str, Pairs] = {
    "neox": (),
    "te": (
        ("post_attention_layernorm.scale", "mlp.layer_norm_weight"),  # the norm before the MLP is part of it
        ("post_attention_layernorm.", "mlp.layer_norm_"),
        ("mlp.linear1.", "mlp.fc1_"),
        ("mlp.linear2.", "mlp.fc2_"),
    ),
    "legacy": (("mlp.linear1.", "mlp.dense_h_to_4h."), ("mlp.linear2.", "mlp.dense_4h_to_h.")),
    "llama": (("mlp.linear2.", "mlp.w2."),),  # linear1 is w3 (up) and w1 (gate)
}
_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm", "norm",
)  # fmt: skip
_TE_NORMS: Pairs = tuple(
    pair for norm in _NORMS for pair in ((f"{norm}.scale", f"{norm}.norm.weight"), (f"{norm}.", f"{norm}.norm."))
)
# foreign prefix -> our prefix; the first that matches is used
_RENAMES: Pairs = (
    *((foreign, ours) for ours, foreign in (*_TE_MHA, *_MLP["te"][1:], *_MLP["legacy"], *_MLP["llama"])),
    *((f"{norm}.norm.", f"{norm}.") for norm in _NORMS),  # norms wrapped in a module
)
# Buffers and blobs without trained values.
_IGNORED = re.compile(
    r".*_extra_state|attention\.(masked_)?bias|attention\.rotary_emb(eddings)?\..*|(attention\.)?alibi_embed\..*"
    r"|rotary_emb\..*"
)


# A prefix of names in a block -> the naming that it is a mark of; the first that is found counts.
_MARKS: Pairs = (
    ("attention.qkv.", WEIGHT_NAMINGS["te"]),
    ("mlp.fc1_", WEIGHT_NAMINGS["te"]),
    ("mlp.dense_h_to_4h.", WEIGHT_NAMINGS["legacy"]),
    ("mlp.w1.", WEIGHT_NAMINGS["llama"]),
    ("pre_feedforward_layernorm.", WEIGHT_NAMINGS["neox"]),  # Gemma's, which no other program has
    ("post_feedforward_layernorm.", _OLMO),
)
_OLD_ROWS = (WEIGHT_NAMINGS["legacy"], WEIGHT_NAMINGS["llama"])  # gone when #1315 came, in November 2024


def naming_of(names: Collection[str]) -> str:
    """The naming that the tensors of a block have, in words, as in `WEIGHT_NAMINGS`."""
    namings = (naming for mark, naming in _MARKS if any(name.startswith(mark) for name in names))
    return next(namings, WEIGHT_NAMINGS["neox"])


def has_old_rows(names: Collection[str], attention: AttentionSpec | None, rows: str | None) -> bool:
    """Whether the rows of a block's grouped queries, keys and values are in the order of before GPT-NeoX's
    #1315.

    names: those of the block's tensors, which decide it where `rows`, the value of `compat_gqa_rows`, is
    None.
    """
    if attention is None or attention.kv_heads == attention.heads:
        return False
    if any(name.startswith("attention.qkv.") for name in names):
        return False
    return naming_of(names) in _OLD_ROWS if rows is None else rows == "pre1315"


def our_name(name: str, expected: Collection[str]) -> str | None:
    """Our name for a foreign one; the same name when it is ours or unknown; None for a tensor to leave out.

    expected: our names of the layer.
    """
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
    layer: int,
    tensors: Mapping[str, Tensor],
    expected: Collection[str],
    args: NeoXArgs,
    where: str,
    rows: str | None = None,
) -> dict[str, Tensor]:
    """The tensors of one layer (by its NeoX index) of one tensor rank under our names, with rows in our
    order.

    expected: our names of that layer. where: the file, for errors. rows: as in `has_old_rows`.
    Raises CheckpointError for two names of one tensor, and for trained values of a norm that gpt_j_tied
    leaves out.
    """
    tensors, attention = dict(tensors), attention_of(args, layer)
    old = has_old_rows(tensors, attention, rows)
    out: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        up, gate = f"mlp.w3.{kind}", f"mlp.w1.{kind}"
        if up in tensors and gate in tensors:
            out[f"mlp.linear1.{kind}"] = torch.cat([tensors.pop(up), tensors.pop(gate)])
    unused = {spec.name: spec for spec in unused_params(args, layer)}
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
        if name.startswith("attention.qkv.") and attention is not None:
            tensor = _groups_apart(tensor, attention)
        elif name.startswith("mlp.fc1_"):
            tensor = _halves_swapped(tensor, args)
        elif old and attention is not None and name.startswith("attention.query_key_value."):
            tensor = _slices_apart(tensor, attention)
        out[ours] = tensor
    return out


def to_file_names(
    layer: int, tensors: Mapping[str, Tensor], args: NeoXArgs, naming: str | None = None
) -> dict[str, Tensor]:
    """The tensors of one layer (by its NeoX index) of one tensor rank as GPT-NeoX writes them, with its
    unused norms and buffers.

    naming: a key of `WEIGHT_NAMINGS`; None: the naming that this configuration has in GPT-NeoX. Raises
    CheckpointError where the model has no names in it.
    """
    mlp = naming or ("te" if args.te_layernorm_mlp else "neox")
    te_attention = naming == "te" if naming else args.te_mha
    _check_names(mlp, args)
    table = (
        *(_TE_MHA if te_attention else ()),
        *_MLP[mlp],
        *(_TE_NORMS if args.norm.startswith("te_") else ()),
    )
    tensors, attention = dict(tensors), attention_of(args, layer)
    old = has_old_rows((), attention, "pre1315" if WEIGHT_NAMINGS[mlp] in _OLD_ROWS else "post1315")
    like = tensors.get("attention.query_key_value.weight")  # None outside blocks
    if like is not None:
        for spec in unused_params(args, layer):
            tensors[spec.name] = torch.full(spec.shape, float(spec.init == "ones"), dtype=like.dtype)
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kind = name.removeprefix("mlp.linear1.")
        if attention is not None and name.startswith("attention.query_key_value."):
            tensor = _groups_together(tensor, attention) if te_attention else _slices_together(tensor, attention, old)
        elif mlp == "te" and kind != name:
            tensor = _halves_swapped(tensor, args)
        elif mlp == "llama" and kind != name:
            up, gate = tensor.chunk(2)
            out[f"mlp.w3.{kind}"], out[f"mlp.w1.{kind}"] = up.clone(), gate.clone()
            continue
        out[_renamed(name, table)] = tensor
    if like is not None and args.rotary_save_freqs_buffer and args.pos_emb == "rotary":
        rotary = rotary_spec(args)
        width = rotary.width
        exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
        module = "rotary_embeddings" if te_attention else "rotary_emb"
        # DeepSpeed casts NeoX's buffers with the weights.
        out[f"attention.{module}.inv_freq"] = (1.0 / rotary.base**exponent).to(like.dtype)
    return out


def _check_names(mlp: str, args: NeoXArgs) -> None:
    if mlp == "llama" and not args.is_gated:
        raise CheckpointError(f"w1, w2, w3 are names of gated MLPs, this one's activation is {args.activation}")
    if WEIGHT_NAMINGS[mlp] in _OLD_ROWS and args.moe_num_experts > 1:  # the names of an MLP tell how rows lie
        raise CheckpointError(f"blocks with experts have no {mlp} names; write those of neox or te")
    if mlp == "te" and has_one_norm(args):
        raise CheckpointError("Transformer-Engine's MLP has a norm of its own, with gpt_j_tied: true there is none")


# Transformer-Engine's MultiheadAttention views its rows as `[kv_heads, queries of one + 2, head_dim]`
# (qkv_weight_interleaved, its default): the queries of a key-value head, its key, its value. Ours are all
# queries, all keys, all values of a rank. With one query a key-value head both are NeoX's [q|k|v] per head.


def _groups_apart(qkv: Tensor, attention: AttentionSpec) -> Tensor:
    queries = attention.heads // attention.kv_heads
    if queries == 1 or len(qkv) % (
        (queries + 2) * attention.head_dim
    ):  # of another model: the error about its shape comes later
        return qkv
    groups = qkv.unflatten(0, (-1, queries + 2, attention.head_dim))
    return torch.cat([part.flatten(0, 2) for part in groups.split([queries, 1, 1], 1)])


def _groups_together(qkv: Tensor, attention: AttentionSpec) -> Tensor:
    queries = attention.heads // attention.kv_heads
    if queries == 1:
        return qkv
    kv = len(qkv) // (queries + 2)
    if kv % attention.head_dim:
        raise CheckpointError(
            "Transformer-Engine's rows are of whole key-value heads, and here tensor ranks share "
            f"the {attention.kv_heads}; write the names of neox, or for fewer ranks"
        )
    parts, width = qkv.split([queries * kv, kv, kv]), attention.head_dim
    return torch.cat([part.unflatten(0, (kv // width, -1, width)) for part in parts], 1).flatten(0, 2)


# Before #1315 GPT-NeoX's gqa_project viewed its rows as `[heads, head_dim + 2 * slice]`: a query, then equal
# slices of all keys and of all values, so that the slices of all heads together are the keys,
# `[kv_heads, head_dim]`. Its convert_raw_llama_weights_to_neox.py writes w1, w2, w3 beside rows of this
# order.


def _slice(attention: AttentionSpec) -> int:
    if attention.head_dim * attention.kv_heads % attention.heads:
        raise CheckpointError(
            f"there were no rows of before #1315 for {attention.kv_heads} key-value heads of {attention.head_dim} and "
            f"{attention.heads} queries; compat_gqa_rows: post1315 takes them as since then"
        )
    return attention.head_dim * attention.kv_heads // attention.heads


def _slices_apart(qkv: Tensor, attention: AttentionSpec) -> Tensor:
    width, slices = attention.head_dim, _slice(attention)
    if len(qkv) % (width + 2 * slices):  # of another model: the error about its shape comes later
        return qkv
    heads = qkv.unflatten(0, (-1, width + 2 * slices))
    return torch.cat([part.flatten(0, 1) for part in heads.split([width, slices, slices], 1)])


def _slices_together(qkv: Tensor, attention: AttentionSpec, old: bool) -> Tensor:
    if not old:
        return qkv
    width, slices = attention.head_dim, _slice(attention)
    heads = len(qkv) // (width + 2 * slices)
    parts = qkv.split([heads * width, heads * slices, heads * slices])
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)


def _halves_swapped(linear1: Tensor, args: NeoXArgs) -> Tensor:
    """The rows of a gated linear1 between NeoX's order [up; gate] and Transformer-Engine's [gate; up].

    Transformer-Engine's tests apply the activation to the first half of fc1's output and multiply by the
    second.
    """
    return torch.cat(linear1.chunk(2)[::-1]) if args.is_gated else linear1
