"""Describes the family CWM (Code World Model): LLaMA's blocks, most of them with a sliding window."""

from typing import Any

from megatron.checkpointing.families.config_fields import (
    drop_fields,
    layer_kinds,
    needed_window,
    window_config,
    window_keys,
)
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import ROWS, llama_config, llama_keys
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 6144, "num_hidden_layers": 64, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 21504, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


def _keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, **config, "attention_bias": False}  # transformers reads no attention_bias
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config["rope_parameters"] = _LLAMA3  # transformers has this default too, and then ignores rope_theta
    kinds = layer_kinds(config, lambda i: i % 4 != 0)
    return {
        **llama_keys(config, _DEFAULTS, theta=1000000.0),
        **window_keys(needed_window(config, 8192, kinds), kinds),
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    config = llama_config(args)
    rope = {**(config["rope_scaling"] or {"rope_type": "default"}), "rope_theta": config["rope_theta"]}
    return {
        **drop_fields(config, "attention_bias"),
        "rope_parameters": rope,
        "mlp_bias": args.use_bias_in_mlp,
        **window_config(args, 8192),
    }


CWM = Family("cwm", "CwmForCausalLM", ROWS, _keys, _config, title="CWM", has_scorer=False, needs_bos=True)
