"""Describes the GPT-NeoX and Pythia family, whose fused QKV rows are in the same order as ours."""

from typing import Any

from megatron.checkpointing.families.config_fields import (
    get,
    plain_activation,
    plain_activation_keys,
    rope_config,
    rope_keys,
    rope_of,
    size_config,
    size_keys,
)
from megatron.checkpointing.families.family import Config, Family, TensorMapping, weight_and_bias
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64, "intermediate_size": 24576,
    "max_position_embeddings": 2048,
}  # fmt: skip
_BLOCK = "gpt_neox.layers.{}."
ROWS = (
    TensorMapping("word_embeddings.weight", ("gpt_neox.embed_in.weight",)),
    *weight_and_bias("input_layernorm", _BLOCK + "input_layernorm"),
    *weight_and_bias("attention.query_key_value", _BLOCK + "attention.query_key_value"),
    *weight_and_bias("attention.dense", _BLOCK + "attention.dense"),
    *weight_and_bias("post_attention_layernorm", _BLOCK + "post_attention_layernorm"),
    *weight_and_bias("mlp.linear1", _BLOCK + "mlp.dense_h_to_4h"),
    *weight_and_bias("mlp.linear2", _BLOCK + "mlp.dense_4h_to_h"),
    *weight_and_bias("norm", "gpt_neox.final_layer_norm"),
    TensorMapping("final_linear.weight", ("embed_out.weight",)),
)


def to_keys(config: Config) -> dict[str, Any]:
    rope = rope_of(config, theta=10000.0, spelt="rotary_emb_base")
    rotated = rope.pop("partial_rotary_factor", get(config, "rotary_pct", 0.25))
    return {
        **size_keys(config, _DEFAULTS),
        **rope_keys({**_DEFAULTS, **config}, rope),
        "rotary_pct": rotated,
        "norm": "layernorm",
        "layernorm_epsilon": get(config, "layer_norm_eps", 1e-5),
        "gpt_j_residual": get(config, "use_parallel_residual", True),
        "use_bias_in_attn_linear": get(config, "attention_bias", True),
        **plain_activation_keys(config, "hidden_act", "gelu"),
    }


def to_config(args: ModelArgs) -> dict[str, Any]:
    rope = rope_config(args)
    return {
        **size_config(args),
        **rope,
        "rotary_emb_base": rope["rope_theta"],
        "rotary_pct": args.rotary_pct,
        "layer_norm_eps": args.layernorm_epsilon,
        "use_parallel_residual": args.gpt_j_residual,
        "attention_bias": args.use_bias_in_attn_linear,
        "hidden_act": plain_activation(args, "gelu"),
    }


GPT_NEOX = Family(
    "gpt_neox", "GPTNeoXForCausalLM", ROWS, to_keys, to_config,
    title="GPT-NeoX, Pythia", notes="config.json sets: sequential attention and MLP, no biases",
    base_prefix="gpt_neox.", ignored=r".*attention\.(bias|masked_bias|rotary_emb\.inv_freq)|.*rotary_emb\.inv_freq",
)  # fmt: skip
