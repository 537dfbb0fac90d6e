"""Describes LFM 2: short convolutions in most blocks, attention in the others, and an MLP or experts."""

from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import FULL, drop_fields, get, refuse_unless, rope_keys, rope_of
from megatron.checkpointing.families.experts import expert_config, expert_keys, expert_rows, experts_in_memory
from megatron.checkpointing.families.family import UP_GATE, Config, Family, TensorMapping, weight_and_bias
from megatron.checkpointing.families.llama import PER_HEAD, common_keys, llama_config, replaced_rows
from megatron.checkpointing.families.mamba import with_defaults
from megatron.neox_arguments import ModelArgs

_BLOCK = "model.layers.{}."
_FEED, _CONV = _BLOCK + "feed_forward.", _BLOCK + "conv."
_MATRICES = ("w1", "w3", "w2")
_CONVOLUTION = "conv"
_KINDS = {_CONVOLUTION: "short_conv", FULL: "global"}
_ROWS = replaced_rows(
    TensorMapping("input_layernorm.scale", (_BLOCK + "operator_norm.weight",)),
    TensorMapping("post_attention_layernorm.scale", (_BLOCK + "ffn_norm.weight",)),
    TensorMapping("attention.q_norm.scale", (_BLOCK + "self_attn.q_layernorm.weight",)),
    TensorMapping("attention.k_norm.scale", (_BLOCK + "self_attn.k_layernorm.weight",)),
    TensorMapping("attention.dense.weight", (_BLOCK + "self_attn.out_proj.weight",)),
    TensorMapping("mlp.linear1.weight", (f"{_FEED}w3.weight", f"{_FEED}w1.weight"), UP_GATE),
    TensorMapping("mlp.linear2.weight", (f"{_FEED}w2.weight",)),
    *weight_and_bias("mixer.in_proj", _CONV + "in_proj"),
    *weight_and_bias("mixer.conv1d", _CONV + "conv"),
    *weight_and_bias("mixer.out_proj", _CONV + "out_proj"),
    TensorMapping("norm.scale", ("model.embedding_norm.weight",)),
)
_MOE_ROWS = tuple(
    {
        row.neox_name: row
        for row in (
            *_ROWS, *expert_rows(_FEED, *_MATRICES),
            TensorMapping("mlp.router.expert_bias", (f"{_FEED}expert_bias",)),
        )
    }.values()
)  # fmt: skip
_SHARED = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000,
    "norm_eps": 1e-5, "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3,
}  # fmt: skip
_DENSE = {
    **_SHARED, "hidden_size": 2560, "intermediate_size": 12288, "block_multiple_of": 256,
    "block_auto_adjust_ff_dim": True,
}  # fmt: skip
_MOE = {
    **_SHARED, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
    "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True, "router_aux_loss_coef": 0.0,
}  # fmt: skip


def _blocks(config: Config) -> list[str]:
    """Returns the NeoX name of each block's kind. Raises CheckpointError for an unsupported kind."""
    number = config["num_hidden_layers"]
    attending = get(config, "full_attn_idxs", range(number))
    types = get(config, "layer_types", [FULL if i in attending else _CONVOLUTION for i in range(number)])
    unknown = sorted({*types} - {*_KINDS})
    if unknown:
        raise CheckpointError(
            f"config.json: layer_types: {', '.join(unknown)} is not supported, only {_CONVOLUTION}, {FULL}"
        )
    return [_KINDS[kind] for kind in types]


def _hybrid_keys(config: Config, width: int) -> dict[str, Any]:
    """Returns the NeoX configuration keys for a model without experts. width: of its MLP."""
    older = {name: config[field] for field, name in (("tie_embedding", "tie_word_embeddings"),) if field in config}
    refuse_unless(config, "hidden_act", "silu")
    config = {**config, **older, "rms_norm_eps": config["norm_eps"], "intermediate_size": width}
    blocks = _blocks(config)
    convolves = _KINDS[_CONVOLUTION] in blocks
    return {
        **common_keys({**config, "mlp_bias": False, "attention_bias": False, "hidden_act": "silu"}, config),
        **rope_keys(config, rope_of(config, theta=1000000.0)),
        **PER_HEAD,
        "attention_config": blocks,
        **({"short_conv_kernel": config["conv_L_cache"]} if convolves else {}),
        **({"use_bias_in_short_conv": config["conv_bias"]} if convolves else {}),
    }


def _hybrid_config(args: ModelArgs) -> dict[str, Any]:
    """Returns config.json's fields for a model without experts, the inverse of `_hybrid_keys`."""
    names = {kind: name for name, kind in _KINDS.items()} | {"flash": FULL}
    unsupported = sorted({*args.attention_config} - {*names})
    if unsupported:
        raise CheckpointError(f"LFM 2 has no blocks of kind {', '.join(unsupported)} (attention_config)")
    fields = drop_fields(llama_config(args, head_dim=False), "rms_norm_eps", "hidden_act", "attention_bias")
    return {
        **fields,
        "norm_eps": args.rms_norm_epsilon,
        "layer_types": [names[kind] for kind in args.attention_config],
        "conv_L_cache": args.short_conv_kernel,
        "conv_bias": args.use_bias_in_short_conv,
    }


def _dense_width(config: Config) -> int:
    """Returns the width of the MLP, as transformers computes it from config.json."""
    width: int = get(config, "block_ff_dim", config["intermediate_size"])
    if not config["block_auto_adjust_ff_dim"]:
        return width
    width, multiple = int(2 * width / 3), config["block_multiple_of"]
    if (factor := config.get("block_ffn_dim_multiplier", 1.0)) is not None:
        width = int(factor * width)
    return multiple * -(-width // multiple)


def _keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _DENSE)
    return _hybrid_keys(config, _dense_width(config))


def _config(args: ModelArgs) -> dict[str, Any]:
    return {**_hybrid_config(args), "block_auto_adjust_ff_dim": False}


LFM2 = Family(
    "lfm2", "Lfm2ForCausalLM", _ROWS, _keys, _config, title="LFM 2", has_scorer=False,
    notes="config.json sets: kinds of blocks, biases of convolutions",
)  # fmt: skip


def _moe_keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _MOE)
    refuse_unless(config, "output_router_logits", False)
    blocks, dense = config["num_hidden_layers"], config["num_dense_layers"]
    return {
        **_hybrid_keys(config, config["intermediate_size"]),
        **expert_keys(config, config),
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_intermediate_size": config["moe_intermediate_size"],
        **({"moe_router_bias_update_rate": 0.0} if config["use_expert_bias"] else {}),
        **({"moe_layer_freq": [int(i >= dense) for i in range(blocks)]} if dense > 0 else {}),
    }


def _moe_config(args: ModelArgs) -> dict[str, Any]:
    with_experts = [args.has_experts(block) for block in range(args.num_layers)]
    return {
        **_hybrid_config(args),
        **drop_fields(expert_config(args), "output_router_logits", "router_aux_loss_coef"),
        "moe_intermediate_size": args.expert_ffn_size,
        "num_dense_layers": with_experts.index(True) if True in with_experts else args.num_layers,
        "routed_scaling_factor": args.moe_router_topk_scaling_factor,
        "use_expert_bias": args.moe_router_bias_update_rate is not None,
    }


LFM2_MOE = Family(
    "lfm2_moe", "Lfm2MoeForCausalLM", _MOE_ROWS, _moe_keys, _moe_config, title="LFM 2 MoE", has_scorer=False,
    in_memory=experts_in_memory(_FEED, *_MATRICES, fused=f"{_FEED}experts."),
    notes="config.json sets: kinds of blocks, dense blocks at the start, biases of convolutions",
)  # fmt: skip
