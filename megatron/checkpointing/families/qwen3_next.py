"""Describes Qwen 3-Next and 3.5: Gated DeltaNet in most blocks, gated attention in the others, and experts or
an MLP.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import FULL, drop_fields, get, rope_keys, rope_of
from megatron.checkpointing.families.experts import EXPERT_ROWS, EXPERTS_IN_MEMORY, expert_config, expert_keys
from megatron.checkpointing.families.family import Config, Family, TensorMapping, Transform
from megatron.checkpointing.families.llama import PER_HEAD, ROWS, common_keys, llama_config
from megatron.checkpointing.families.mamba import with_defaults
from megatron.checkpointing.families.qwen import blocks_with_experts
from megatron.model.specs import GatedDeltaNetSpec, MixerSpec
from megatron.neox_arguments import ModelArgs

LINEAR = "linear_attention"
_NET = "model.layers.{}.linear_attn."
_KINDS = {LINEAR: "gated_delta_net", FULL: "global"}
# Our keys of Gated DeltaNet, which are also fields of config.json.
_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
_DEFAULTS = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "intermediate_size": 5632, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "decoder_sparse_step": 1, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001, "full_attention_interval": 4,
}  # fmt: skip


def _widths(net: GatedDeltaNetSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the rows of each head of keys in HuggingFace's in_proj_qkvz and in_proj_ba."""
    share = net.heads // net.key_heads
    return (net.key_dim, net.key_dim, share * net.value_dim, share * net.value_dim), (share, share)


def _join(parts: Sequence[Tensor], net: MixerSpec | None) -> Tensor:
    assert isinstance(net, GatedDeltaNetSpec)
    heads = (part.unflatten(0, (net.key_heads, -1)) for part in parts)
    pieces = (piece for part, widths in zip(heads, _widths(net), strict=True) for piece in part.split(widths, 1))
    return torch.cat([piece.flatten(0, 1) for piece in pieces])


def _split(fused: Tensor, net: MixerSpec | None) -> tuple[Tensor, ...]:
    assert isinstance(net, GatedDeltaNetSpec)
    widths = _widths(net)
    pieces = fused.split([net.key_heads * width for part in widths for width in part])
    heads = [piece.unflatten(0, (net.key_heads, -1)) for piece in pieces]
    return tuple(torch.cat(part, 1).flatten(0, 1) for part in (heads[:4], heads[4:]))


# HuggingFace's tensors hold [queries | keys | values | gates], and [rates | decays], per head of keys.
_GROUPED = Transform(_join, _split)
_NET_ROWS = (
    TensorMapping("mixer.conv1d.weight", (_NET + "conv1d.weight",)),
    TensorMapping("mixer.dt_bias", (_NET + "dt_bias",)),
    TensorMapping("mixer.A_log", (_NET + "A_log",)),
    TensorMapping("mixer.norm.weight", (_NET + "norm.weight",)),
    TensorMapping("mixer.out_proj.weight", (_NET + "out_proj.weight",)),
)
_ROWS = (
    *EXPERT_ROWS,
    TensorMapping("mixer.in_proj.weight", (_NET + "in_proj_qkvz.weight", _NET + "in_proj_ba.weight"), _GROUPED),
    *_NET_ROWS,
)


def _blocks(config: Config) -> list[str]:
    """Returns the NeoX name of each block's kind. Raises CheckpointError for an unsupported kind."""
    interval = config["full_attention_interval"]
    usual = [LINEAR if (i + 1) % interval else FULL for i in range(config["num_hidden_layers"])]
    types = get(config, "layer_types", usual)
    unknown = sorted(set(types) - _KINDS.keys())
    if unknown:
        raise CheckpointError(f"config.json: layer_types: {', '.join(unknown)} is not supported, only {LINEAR}, {FULL}")
    return [_KINDS[name] for name in types]


def _hybrid_keys(config: Config) -> dict[str, Any]:
    """Returns the NeoX configuration keys for kinds of blocks, attention and Gated DeltaNet.

    config: config.json with the defaults of its family."""
    blocks = _blocks(config)
    return {
        **common_keys({**config, "mlp_bias": False}, config),
        **rope_keys(config, rope_of(config, theta=10000.0), partial=True),
        **PER_HEAD,
        "zero_centered_gamma": True,
        "attention_config": blocks,
        "attention_output_gate": "global" in blocks,
        **({name: config[name] for name in _SIZES} if "gated_delta_net" in blocks else {}),
    }


def _hybrid_config(args: ModelArgs) -> dict[str, Any]:
    """Returns config.json's fields for kinds of blocks, the inverse of `_hybrid_keys`."""
    names = {kind: name for name, kind in _KINDS.items()} | {"flash": FULL}
    unsupported = sorted(set(args.attention_config) - names.keys())
    if unsupported:
        raise CheckpointError(f"Qwen 3-Next and 3.5 have no blocks of kind {', '.join(unsupported)} (attention_config)")
    return {
        **llama_config(args, partial=True),
        "layer_types": [names[kind] for kind in args.attention_config],
        **{name: getattr(args, name) for name in _SIZES},
    }


_SHARED = "shared_expert_intermediate_size"


def _mixture_keys(config: Config) -> dict[str, Any]:
    """Returns the NeoX configuration keys for experts beside a gated shared expert."""
    return {
        **expert_keys(config, config),
        "moe_intermediate_size": config["moe_intermediate_size"],
        f"moe_{_SHARED}": config[_SHARED],
        "moe_shared_expert_gate": True,
    }


def _mixture_config(args: ModelArgs) -> dict[str, Any]:
    """Returns config.json's fields for experts, the inverse of `_mixture_keys`."""
    return {
        **expert_config(args),
        "moe_intermediate_size": args.expert_ffn_size,
        _SHARED: args.moe_shared_expert_intermediate_size,
    }


def _keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _DEFAULTS)
    return {**_hybrid_keys(config), **_mixture_keys(config), **blocks_with_experts(config)}


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **_hybrid_config(args),
        **_mixture_config(args),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [block for block in range(args.num_layers) if not args.has_experts(block)],
    }


QWEN3_NEXT = Family(
    "qwen3_next", "Qwen3NextForCausalLM", _ROWS, _keys, _config, title="Qwen 3-Next", carried=r"mtp\..*",
    in_memory=EXPERTS_IN_MEMORY, has_mtp_block=True,
    notes="config.json sets: kinds of blocks, dense blocks; the block for multi-token prediction (mtp) is trained with "
    "mtp_num_layers: 1, else kept",
)  # fmt: skip


def _join_separate(parts: Sequence[Tensor], net: MixerSpec | None) -> Tensor:
    return torch.cat(tuple(parts))


def _split_separate(fused: Tensor, net: MixerSpec | None) -> tuple[Tensor, ...]:
    assert isinstance(net, GatedDeltaNetSpec)
    return fused.split((2 * net.keys + net.values, net.values, net.heads, net.heads))


_IN_35 = tuple(f"{_NET}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
_NET_ROWS_35 = (
    TensorMapping("mixer.in_proj.weight", _IN_35, Transform(_join_separate, _split_separate)),
    *_NET_ROWS,
)
_QWEN3_5 = {
    **_DEFAULTS, "hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 4, "intermediate_size": 12288,
}  # fmt: skip
_QWEN3_5_MOE = {**_DEFAULTS, "num_hidden_layers": 40, "num_experts_per_tok": 8, "num_experts": 256}


def _prediction_field(args: ModelArgs) -> dict[str, Any]:
    """Returns the field that servers read; transformers reads none."""
    return {"mtp_num_hidden_layers": 1} if args.mtp_num_layers == 1 else {}


def _dense_config_35(args: ModelArgs) -> dict[str, Any]:
    return {**_hybrid_config(args), **_prediction_field(args)}


def _dense_keys_35(config: Config) -> dict[str, Any]:
    return _hybrid_keys(with_defaults(config, _QWEN3_5))


QWEN3_5 = Family(
    "qwen3_5_text", "Qwen3_5ForCausalLM", (*ROWS, *_NET_ROWS_35), _dense_keys_35, _dense_config_35, title="Qwen 3.5",
    carried=r"mtp\..*", has_mtp_block=True, scorer="Qwen3_5TextForSequenceClassification",
    notes="config.json sets: kinds of blocks; the block for multi-token prediction (mtp) is trained with "
    "mtp_num_layers: 1, else kept",
)  # fmt: skip


def _moe_keys_35(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _QWEN3_5_MOE)
    # transformers normalises scores whatever norm_topk_prob is, and has no width of dense blocks.
    fields = {**config, "norm_topk_prob": True, "intermediate_size": config[_SHARED]}
    return {**_hybrid_keys(fields), **_mixture_keys(fields)}


def _moe_config_35(args: ModelArgs) -> dict[str, Any]:
    fields = {**_hybrid_config(args), **_mixture_config(args), **_prediction_field(args)}
    return drop_fields(fields, "intermediate_size", "norm_topk_prob")


QWEN3_5_MOE = Family(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", (*EXPERT_ROWS, *_NET_ROWS_35), _moe_keys_35, _moe_config_35,
    title="Qwen 3.5 MoE", carried=r"mtp\..*", has_mtp_block=True, in_memory=EXPERTS_IN_MEMORY, has_scorer=False,
    notes="config.json sets: kinds of blocks; the block for multi-token prediction (mtp) is trained with "
    "mtp_num_layers: 1, else kept",
)  # fmt: skip
