"""Converts parameter names and row orders of other programs to ours and back, with one table.

Our names are GPT-NeoX's current names, plus norms of the geodesic fork's OLMo. Other namings are read, and
written on request: NeoX before mid-2024 (Pythia, 20B), its llama conversions (w1, w2, w3), and
Transformer-Engine naming (te_mha, te_layernorm_mlp; the geodesic fork). Wrapped norms (apex) are only read.
"""

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.model.build_specs import has_one_norm, rotary_spec
from megatron.model.specs import AttentionSpec
from megatron.model.weight_map import attention_of, unused_params
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.keys.weight_names import WEIGHT_NAMINGS

Pairs = tuple[tuple[str, str], ...]
_OLMO = "of the geodesic fork's OLMo"
# (our prefix, other program's prefix); the first that matches is used
_TE_MHA: Pairs = (("attention.query_key_value.", "attention.qkv."), ("attention.dense.", "attention.proj."))
_MLP: Mapping[str, Pairs] = {
    "neox": (),
    "te": (
        ("post_attention_layernorm.scale", "mlp.layer_norm_weight"),  # TE's MLP contains the norm before it
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
# (other program's prefix, our prefix); the first that matches is used
_RENAMES: Pairs = (
    *((foreign, neox_name) for neox_name, foreign in (*_TE_MHA, *_MLP["te"][1:], *_MLP["legacy"], *_MLP["llama"])),
    *((f"{norm}.norm.", f"{norm}.") for norm in _NORMS),  # norms wrapped in a module
)
# Buffers and other state without trained values.
_IGNORED = re.compile(
    r".*_extra_state|attention\.(masked_)?bias|attention\.rotary_emb(eddings)?\..*|(attention\.)?alibi_embed\..*"
    r"|rotary_emb\..*"
)


# A prefix of names in a block -> the naming that it shows; the first match counts.
_MARKS: Pairs = (
    ("attention.qkv.", WEIGHT_NAMINGS["te"]),
    ("mlp.fc1_", WEIGHT_NAMINGS["te"]),
    ("mlp.dense_h_to_4h.", WEIGHT_NAMINGS["legacy"]),
    ("mlp.w1.", WEIGHT_NAMINGS["llama"]),
    ("pre_feedforward_layernorm.", WEIGHT_NAMINGS["neox"]),  # only this program has this norm (of Gemma)
    ("post_feedforward_layernorm.", _OLMO),
)
_OLD_ROWS = (WEIGHT_NAMINGS["legacy"], WEIGHT_NAMINGS["llama"])  # removed before #1315, in November 2024


def naming_of(names: Collection[str]) -> str:
    """Returns words for the naming that a block's tensors have, such as a value of `WEIGHT_NAMINGS`.

    names: of the block's tensors in the file."""
    namings = (naming for mark, naming in _MARKS if any(name.startswith(mark) for name in names))
    return next(namings, WEIGHT_NAMINGS["neox"])


def has_old_rows(names: Collection[str], attention: AttentionSpec | None, rows: str | None) -> bool:
    """Whether a block's query_key_value has the row order of grouped attention before GPT-NeoX's #1315.

    names: of the block's tensors in the file. rows: the value of `compat_gqa_rows`; None: `names` decide."""
    if attention is None or attention.kv_heads == attention.heads:
        return False
    if any(name.startswith("attention.qkv.") for name in names):
        return False
    return naming_of(names) in _OLD_ROWS if rows is None else rows == "pre1315"


def neox_name_of(name: str, expected: Collection[str]) -> str | None:
    """Converts a tensor's name in a file to our name; returns None for a tensor to ignore.

    Names that are already ours, and unknown names, are returned unchanged. expected: our names of the layer.
    """
    if _IGNORED.fullmatch(name):
        return None
    name = _renamed(name, _RENAMES)
    scale = name.removesuffix(".weight") + ".scale"  # wrapped and TE's RMSNorms call NeoX's `scale` `weight`
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
    args: ModelArgs,
    source: str,
    rows: str | None = None,
) -> dict[str, Tensor]:
    """Converts one tensor rank's tensors of a layer, as in the file, to our names and row order.

    layer: its NeoX index. expected: our names of the layer. source: the file, for errors.
    rows: the value of `compat_gqa_rows`; None: the names decide.
    Raises CheckpointError if two tensors convert to one name, or if gpt_j_tied leaves out a norm that has
    trained values."""
    tensors, attention = dict(tensors), attention_of(args, layer)
    old = has_old_rows(tensors, attention, rows)
    out: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        up, gate = f"mlp.w3.{kind}", f"mlp.w1.{kind}"
        if up in tensors and gate in tensors:
            out[f"mlp.linear1.{kind}"] = torch.cat([tensors.pop(up), tensors.pop(gate)])
    unused = {spec.name: spec for spec in unused_params(args, layer)}
    for name, tensor in tensors.items():
        neox_name = neox_name_of(name, {*expected, *unused})
        if neox_name is None:
            continue
        if neox_name in unused and neox_name not in expected:
            if args.gpt_j_tied and not torch.all(tensor == float(unused[neox_name].init == "ones")):
                raise CheckpointError(
                    f"{source}: {name} was trained, so this model has a second layer norm; set gpt_j_tied: false"
                )
            continue
        if neox_name in out:
            raise CheckpointError(
                f"{source}: {name} and another tensor both convert to {neox_name}; remove one of them"
            )
        if name.startswith("attention.qkv.") and attention is not None:
            tensor = _split_groups(tensor, attention)
        elif name.startswith("mlp.fc1_"):
            tensor = _halves_swapped(tensor, args)
        elif old and attention is not None and name.startswith("attention.query_key_value."):
            tensor = _split_slices(tensor, attention)
        out[neox_name] = tensor
    return out


def to_file_names(
    layer: int, tensors: Mapping[str, Tensor], args: ModelArgs, naming: str | None = None
) -> dict[str, Tensor]:
    """Converts one tensor rank's tensors of a layer, by our names, to GPT-NeoX's names and row order.

    Norms that GPT-NeoX has but does not use, and buffers, are added. layer: its NeoX index. naming: a key of
    `WEIGHT_NAMINGS`; None: the naming that GPT-NeoX uses for this configuration. Raises CheckpointError if
    the naming has no names for this model."""
    mlp = naming or ("te" if args.te_layernorm_mlp else "neox")
    te_attention = naming == "te" if naming else args.te_mha
    _check_names(mlp, args)
    table = (*(_TE_MHA if te_attention else ()), *_MLP[mlp], *(_TE_NORMS if args.norm.startswith("te_") else ()))
    tensors, attention = dict(tensors), attention_of(args, layer)
    old = has_old_rows((), attention, "pre1315" if WEIGHT_NAMINGS[mlp] in _OLD_ROWS else "post1315")
    sample = tensors.get("attention.query_key_value.weight")  # None outside blocks
    if sample is not None:
        for spec in unused_params(args, layer):
            tensors[spec.name] = torch.full(spec.shape, float(spec.init == "ones"), dtype=sample.dtype)
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kind = name.removeprefix("mlp.linear1.")
        if attention is not None and name.startswith("attention.query_key_value."):
            tensor = _join_groups(tensor, attention) if te_attention else _join_slices(tensor, attention, old)
        elif mlp == "te" and kind != name:
            tensor = _halves_swapped(tensor, args)
        elif mlp == "llama" and kind != name:
            up, gate = tensor.chunk(2)
            out[f"mlp.w3.{kind}"], out[f"mlp.w1.{kind}"] = up.clone(), gate.clone()
            continue
        out[_renamed(name, table)] = tensor
    if sample is not None and args.rotary_save_freqs_buffer and args.pos_emb == "rotary":
        rotary = rotary_spec(args)
        width = rotary.width
        exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
        module = "rotary_embeddings" if te_attention else "rotary_emb"
        # DeepSpeed casts NeoX's buffers with the weights.
        out[f"attention.{module}.inv_freq"] = (1.0 / rotary.base**exponent).to(sample.dtype)
    return out


def _check_names(mlp: str, args: ModelArgs) -> None:
    if args.attention_k_eq_v and mlp != "neox":
        raise CheckpointError(f"attention_k_eq_v: the naming {mlp} needs rows of values; choose naming neox")
    if mlp == "llama" and not args.is_gated:
        raise CheckpointError(
            f"the naming llama needs a gated MLP, but activation is {args.activation}; choose naming neox"
        )
    if (
        WEIGHT_NAMINGS[mlp] in _OLD_ROWS and args.moe_num_experts > 1
    ):  # the row order is recognised by names of a dense MLP
        raise CheckpointError(f"the naming {mlp} has no names for blocks with experts; choose neox or te")
    if mlp == "te" and has_one_norm(args):
        raise CheckpointError("the naming te needs a norm before the MLP, but gpt_j_tied: true has none; choose neox")


# Transformer-Engine's MultiheadAttention has rows `[kv_heads, queries per kv head + 2, head_dim]`
# (qkv_weight_interleaved, the default): for each key-value head its queries, its key, its value. Our rows are
# all queries of a rank, then all keys, then all values. With one query per key-value head, both orders are
# NeoX's [q|k|v] per head.


def _split_groups(qkv: Tensor, attention: AttentionSpec) -> Tensor:
    queries = attention.heads // attention.kv_heads
    # Rows that do not fit stay as they are; the caller reports their shape later.
    if queries == 1 or len(qkv) % ((queries + 2) * attention.head_dim):
        return qkv
    groups = qkv.unflatten(0, (-1, queries + 2, attention.head_dim))
    return torch.cat([part.flatten(0, 2) for part in groups.split([queries, 1, 1], 1)])


def _join_groups(qkv: Tensor, attention: AttentionSpec) -> Tensor:
    queries = attention.heads // attention.kv_heads
    if queries == 1:
        return qkv
    kv = len(qkv) // (queries + 2)
    if kv % attention.head_dim:
        raise CheckpointError(
            "the naming te needs whole key-value heads in each tensor rank, but several ranks share one of the "
            f"{attention.kv_heads} heads; choose the naming neox, or fewer tensor ranks"
        )
    parts, width = qkv.split([queries * kv, kv, kv]), attention.head_dim
    return torch.cat([part.unflatten(0, (kv // width, -1, width)) for part in parts], 1).flatten(0, 2)


# Before #1315 GPT-NeoX's gqa_project had rows `[heads, head_dim + 2 * slice]`: for each head its query, an
# equal slice of all keys and one of all values. The key slices together are the keys `[kv_heads, head_dim]`.
# Its convert_raw_llama_weights_to_neox.py writes w1, w2, w3 and rows of this order.


def _slice(attention: AttentionSpec) -> int:
    if attention.head_dim * attention.kv_heads % attention.heads:
        raise CheckpointError(
            f"the row order before GPT-NeoX's #1315 cannot hold {attention.kv_heads} key-value heads of dimension "
            f"{attention.head_dim} with {attention.heads} query heads; set compat_gqa_rows: post1315"
        )
    return attention.head_dim * attention.kv_heads // attention.heads


def _split_slices(qkv: Tensor, attention: AttentionSpec) -> Tensor:
    width, slices = attention.head_dim, _slice(attention)
    if len(qkv) % (width + 2 * slices):  # does not fit: the caller reports its shape later
        return qkv
    heads = qkv.unflatten(0, (-1, width + 2 * slices))
    return torch.cat([part.flatten(0, 1) for part in heads.split([width, slices, slices], 1)])


def _join_slices(qkv: Tensor, attention: AttentionSpec, old: bool) -> Tensor:
    if not old:
        return qkv
    width, slices = attention.head_dim, _slice(attention)
    heads = len(qkv) // (width + 2 * slices)
    parts = qkv.split([heads * width, heads * slices, heads * slices])
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)


def _halves_swapped(linear1: Tensor, args: ModelArgs) -> Tensor:
    """Swaps rows of a gated linear1 between NeoX's order [up; gate] and Transformer-Engine's [gate; up].

    Transformer-Engine applies the activation to the first half of fc1's output, and multiplies by the second
    half."""
    return torch.cat(linear1.chunk(2)[::-1]) if args.is_gated else linear1
