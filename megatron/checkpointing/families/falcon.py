"""Describes the family Falcon, in the form of Falcon 7B: one key-value head, parallel attention and MLP."""

from typing import Any

from megatron.checkpointing.families.config_fields import (
    drop_fields,
    get,
    plain_activation,
    plain_activation_keys,
    refuse_unless,
    rope_config,
    rope_keys,
    rope_of,
    size_config,
    size_keys,
)
from megatron.checkpointing.families.family import Config, Family, TensorMapping, weight_and_bias
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip
_BLOCK = "transformer.h.{}."
ROWS = (
    TensorMapping("word_embeddings.weight", ("transformer.word_embeddings.weight",)),
    *weight_and_bias("input_layernorm", _BLOCK + "input_layernorm"),
    *weight_and_bias("post_attention_layernorm", _BLOCK + "post_attention_layernorm"),
    # Its rows are in our order, with one head of keys and with as many as there are queries.
    *weight_and_bias("attention.query_key_value", _BLOCK + "self_attention.query_key_value"),
    *weight_and_bias("attention.dense", _BLOCK + "self_attention.dense"),
    *weight_and_bias("mlp.linear1", _BLOCK + "mlp.dense_h_to_4h"),
    *weight_and_bias("mlp.linear2", _BLOCK + "mlp.dense_4h_to_h"),
    *weight_and_bias("norm", "transformer.ln_f"),
    TensorMapping("final_linear.weight", ("lm_head.weight",)),
)


def _keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, **config}
    refuse_unless(config, "new_decoder_architecture", False)  # Falcon 40B and 2: other norms and rows
    refuse_unless(config, "alibi", False)
    refuse_unless(config, "num_ln_in_parallel_attn", 1)
    width = get(config, "ffn_hidden_size", 4 * config["hidden_size"])
    biases, parallel = get(config, "bias", False), get(config, "parallel_attn", True)
    return {
        **size_keys({**config, "intermediate_size": width}, _DEFAULTS),
        **rope_keys(config, rope_of(config, theta=10000.0)),
        **plain_activation_keys(config, "activation", "gelu"),
        "num_kv_heads": 1 if get(config, "multi_query", True) else config["num_attention_heads"],
        "norm": "layernorm",
        "layernorm_epsilon": get(config, "layer_norm_epsilon", 1e-5),
        "use_bias_in_attn_linear": biases,
        "use_bias_in_mlp": biases,
        "gpt_j_residual": parallel,
        "gpt_j_tied": parallel,
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    sizes = size_config(args)
    return {
        **drop_fields(sizes, "intermediate_size"),
        **rope_config(args),
        "ffn_hidden_size": sizes["intermediate_size"],
        "multi_query": args.kv_heads == 1,
        "parallel_attn": args.gpt_j_residual,
        "new_decoder_architecture": False,
        "alibi": False,
        "activation": plain_activation(args, "gelu"),
        "layer_norm_epsilon": args.layernorm_epsilon,
        "bias": args.use_bias_in_mlp,
    }


FALCON = Family(
    "falcon", "FalconForCausalLM", ROWS, _keys, _config, title="Falcon 7B", base_prefix="transformer.",
    notes="config.json sets: biases, sequential attention and MLP; ALiBi and the form of Falcon 40B and 2 are refused",
)  # fmt: skip
