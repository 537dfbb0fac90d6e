"""Describes the family StableLM: LayerNorm, partly rotated heads, a gated MLP."""

from typing import Any

from megatron.checkpointing.families.config_fields import drop_fields, get, refuse_unless, rope_keys, rope_of
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import common_keys, llama_config, replaced_rows
from megatron.checkpointing.families.starcoder import LAYERNORM_ROWS
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 6912, "max_position_embeddings": 4096,
}  # fmt: skip


def _keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, "partial_rotary_factor": 0.25, **config}
    refuse_unless(config, "qk_layernorm", False)  # each head has a norm with weights of its own
    refuse_unless(config, "head_dim", config["hidden_size"] // config["num_attention_heads"])
    parallel = get(config, "use_parallel_residual", False)
    return {
        **drop_fields(common_keys({**config, "attention_bias": False, "mlp_bias": False}, config), "rms_norm_epsilon"),
        **rope_keys(config, rope_of(config, theta=10000.0), partial=True),
        "norm": "layernorm",
        "layernorm_epsilon": get(config, "layer_norm_eps", 1e-5),
        "add_qkv_bias": get(config, "use_qkv_bias", False),
        "gpt_j_residual": parallel,
        "gpt_j_tied": parallel,
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **drop_fields(llama_config(args, head_dim=False, partial=True), "rms_norm_eps", "attention_bias"),
        "layer_norm_eps": args.layernorm_epsilon,
        "use_qkv_bias": args.add_qkv_bias,
        "use_parallel_residual": args.gpt_j_residual,
    }


STABLELM = Family(
    "stablelm", "StableLmForCausalLM", replaced_rows(*LAYERNORM_ROWS), _keys, _config, title="StableLM 3B, StableLM 2",
    notes="config.json sets: QKV biases, parallel attention and MLP; norms of each head (StableLM 2 12B) are refused",
)  # fmt: skip
