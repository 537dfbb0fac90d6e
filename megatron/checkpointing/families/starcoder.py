"""Describes the StarCoder 2 family: LayerNorm, biases and an ungated MLP, as in GPT-2.

It has rotary positions and grouped queries.
"""

from typing import Any

from megatron.checkpointing.families.config_fields import (
    drop_fields,
    get,
    plain_activation,
    plain_activation_keys,
    rope_keys,
    rope_of,
    window_of,
)
from megatron.checkpointing.families.family import Config, Family, weight_and_bias
from megatron.checkpointing.families.llama import llama_config, replaced_rows
from megatron.checkpointing.families.mistral import same_windows
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 3072, "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2,
    "intermediate_size": 12288, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
_BLOCK = "model.layers.{}."
# For models built like LLaMA, but with LayerNorm.
LAYERNORM_ROWS = (
    *weight_and_bias("input_layernorm", _BLOCK + "input_layernorm"),
    *weight_and_bias("post_attention_layernorm", _BLOCK + "post_attention_layernorm"),
    *weight_and_bias("norm", "model.norm"),
)
ROWS = replaced_rows(
    *LAYERNORM_ROWS,
    *weight_and_bias("mlp.linear1", _BLOCK + "mlp.c_fc"),
    *weight_and_bias("mlp.linear2", _BLOCK + "mlp.c_proj"),
)


def _keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, **config}
    keys = same_windows({**config, "hidden_act": "silu"}, _DEFAULTS, config.get("sliding_window"))
    biases = get(config, "use_bias", True)
    return {
        **drop_fields(keys, "rms_norm_epsilon"),
        **rope_keys(config, rope_of(config, theta=10000.0)),
        **plain_activation_keys(config, "hidden_act", "gelu_pytorch_tanh"),
        "norm": "layernorm",
        "layernorm_epsilon": get(config, "norm_epsilon", 1e-5),
        "use_bias_in_attn_linear": biases,
        "use_bias_in_mlp": biases,
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **drop_fields(llama_config(args, head_dim=False), "rms_norm_eps", "attention_bias"),
        "hidden_act": plain_activation(args, "gelu_pytorch_tanh"),
        "norm_epsilon": args.layernorm_epsilon,
        "sliding_window": window_of(args),
        "use_bias": args.use_bias_in_attn_linear,
    }


STARCODER2 = Family("starcoder2", "Starcoder2ForCausalLM", ROWS, _keys, _config, title="StarCoder 2")
