"""Describes the gpt-oss family: attention sinks, sliding windows in every second layer, and experts.

Experts have biases and clamped gates, and one tensor holds all experts of a block.
"""

from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import (
    drop_fields,
    get,
    layer_kinds,
    refuse_unless,
    rope_keys,
    rope_of,
    window_config,
    window_keys,
)
from megatron.checkpointing.families.experts import expert_config, expert_keys
from megatron.checkpointing.families.family import Config, Family, TensorMapping, weight_and_bias
from megatron.checkpointing.families.llama import common_keys, llama_config, replaced_rows
from megatron.neox_arguments import ModelArgs

_BLOCK = "model.layers.{}."
_EXPERTS = _BLOCK + "mlp.experts."
# Columns (outputs) of gate_up_proj alternate between gate and up; down_proj has the layout of our w2.
_ROWS = replaced_rows(
    TensorMapping("attention.sinks", (_BLOCK + "self_attn.sinks",)),
    *weight_and_bias("mlp.router.layer", _BLOCK + "mlp.router"),
    *(
        TensorMapping(f"mlp.experts.mlp.{neox_name}", (_EXPERTS + hf_name,), transposed=turned, stacked=True, part=part)
        for name, part in (("w1", (0, 2)), ("w3", (1, 2)))
        for neox_name, hf_name, turned in ((name, "gate_up_proj", True), (f"{name}_bias", "gate_up_proj_bias", False))
    ),
    TensorMapping("mlp.experts.mlp.w2", (_EXPERTS + "down_proj",), stacked=True),
    TensorMapping("mlp.experts.mlp.w2_bias", (_EXPERTS + "down_proj_bias",)),
)
_LIMIT, _ALPHA = 7.0, 1.702  # constants of the clamped gates (swiglu_limit, swiglu_alpha)
_DEFAULTS = {
    "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2880, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True,
    "sliding_window": 128, "num_experts": 128, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _keys(config: Config) -> dict[str, Any]:
    chosen = get(config, "num_experts_per_tok", get(config, "experts_per_token", _DEFAULTS["num_experts_per_tok"]))
    refuse_unless(config, "experts_per_token", chosen)
    refuse_unless(config, "hidden_act", "silu")
    refuse_unless(config, "swiglu_limit", _LIMIT)
    refuse_unless(config, "swiglu_alpha", _ALPHA)
    experts = expert_keys({**config, "num_experts_per_tok": chosen, "norm_topk_prob": True}, _DEFAULTS)
    config = {**_DEFAULTS, **config}
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config["rope_scaling"] = _YARN
    rope = rope_of(config, theta=150000.0)
    length = config.get("initial_context_length")
    if length not in (None, rope.get("original_max_position_embeddings", length)):
        raise CheckpointError(
            f"config.json: initial_context_length: {length} must equal rope_scaling.original_max_position_embeddings: "
            f"{rope['original_max_position_embeddings']}"
        )
    return {
        **common_keys(config, _DEFAULTS),
        **rope_keys(config, rope),
        **window_keys(config["sliding_window"], layer_kinds(config, lambda i: i % 2 == 0)),
        **experts,
        "activation": "swigluoai",
        "attention_sinks": True,
        "moe_router_bias": True,
        "moe_expert_bias": True,
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    experts = drop_fields(
        expert_config(args, "num_local_experts"), "norm_topk_prob"
    )  # gpt-oss always normalizes, and has no field for it
    config = {**llama_config(args), **experts}
    scaling = config["rope_scaling"] or {"rope_type": "default"}  # if the field is absent, transformers assumes yarn
    original = scaling.get("original_max_position_embeddings")
    return {
        **config,
        "rope_scaling": scaling,
        **({} if original is None else {"initial_context_length": original}),
        "intermediate_size": args.expert_ffn_size,
        "experts_per_token": args.moe_top_k,
        "swiglu_limit": _LIMIT,
        **window_config(args, unused=128),  # transformers makes the window's mask even if no layer uses it
    }


GPT_OSS = Family(
    "gpt_oss", "GptOssForCausalLM", _ROWS, _keys, _config, title="gpt-oss",
    notes="clamped gates, expert and router biases; MXFP4 is read, not written",
)  # fmt: skip
