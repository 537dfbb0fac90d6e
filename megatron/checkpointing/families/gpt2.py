"""Describes the GPT-2 family: it has learned positions and stores weights as `[in, out]`."""

from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import (
    get,
    plain_activation,
    plain_activation_keys,
    size_config,
    size_keys,
)
from megatron.checkpointing.families.family import FUSED_QKV, Config, Family, TensorMapping, weight_and_bias
from megatron.model.build_specs import attention_scale
from megatron.neox_arguments import ModelArgs

# GPT-2's names of sizes -> the names in other families.
_SIZES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "n_inner": "intermediate_size",
}  # fmt: skip
_DEFAULTS = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
_BLOCK = "transformer.h.{}."
ROWS = (
    TensorMapping("word_embeddings.weight", ("transformer.wte.weight",)),
    TensorMapping("position_embeddings.weight", ("transformer.wpe.weight",)),
    *weight_and_bias("input_layernorm", _BLOCK + "ln_1"),
    *weight_and_bias("attention.query_key_value", _BLOCK + "attn.c_attn", transform=FUSED_QKV, transposed=True),
    *weight_and_bias("attention.dense", _BLOCK + "attn.c_proj", transposed=True),
    *weight_and_bias("post_attention_layernorm", _BLOCK + "ln_2"),
    *weight_and_bias("mlp.linear1", _BLOCK + "mlp.c_fc", transposed=True),
    *weight_and_bias("mlp.linear2", _BLOCK + "mlp.c_proj", transposed=True),
    *weight_and_bias("norm", "transformer.ln_f"),
    TensorMapping("final_linear.weight", ("lm_head.weight",)),
)


def _keys(config: Config) -> dict[str, Any]:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if get(config, name, False):
            raise CheckpointError(f"config.json: {name}: true is not supported")
    config = {**_DEFAULTS, **{name: config[hf_name] for name, hf_name in _SIZES.items() if hf_name in config}, **config}
    config["n_inner"] = get(config, "n_inner", 4 * config["n_embd"])
    sizes = {hf_name: config[name] for name, hf_name in _SIZES.items()}
    return {
        **size_keys({**config, **sizes}, {"tie_word_embeddings": True}),
        **plain_activation_keys(config, "activation_function", "gelu_new"),
        "pos_emb": "learned",
        "norm": "layernorm",
        "layernorm_epsilon": get(config, "layer_norm_epsilon", 1e-5),
        **({} if get(config, "scale_attn_weights", True) else {"attention_multiplier": 1.0}),
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    sizes = size_config(args)
    config = {name: sizes.pop(hf_name) for name, hf_name in _SIZES.items()}
    if config["n_inner"] == 4 * args.hidden_size:
        config["n_inner"] = None
    return {
        **config,
        **sizes,
        "activation_function": plain_activation(args, "gelu_new"),
        "layer_norm_epsilon": args.layernorm_epsilon,
        "scale_attn_weights": attention_scale(args) != 1.0,
    }


GPT2 = Family(
    "gpt2", "GPT2LMHeadModel", ROWS, _keys, _config, ignored=r".*\.attn\.(bias|masked_bias)", title="GPT-2",
    base_prefix="transformer.", scorer="GPT2ForSequenceClassification",
)  # fmt: skip
