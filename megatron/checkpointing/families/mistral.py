"""Describes the families Mistral, Mixtral (a mixture of experts), Ministral and Ministral 3.

Ministral 3 scales queries by their position.
"""

from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import (
    drop_fields,
    layer_kinds,
    layer_types,
    needed_window,
    refuse_unless,
    rope_keys,
    rope_of,
    same_window_keys,
    window_keys,
    window_of,
)
from megatron.checkpointing.families.experts import MIXTRAL_IN_MEMORY, MIXTRAL_ROWS, expert_config, expert_keys
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import LLAMA_DEFAULTS, ROWS, common_keys, llama_config, llama_keys
from megatron.neox_arguments import ModelArgs

_MISTRAL = {**LLAMA_DEFAULTS, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}


def _mistral_keys(config: Config) -> dict[str, Any]:
    window = config.get("sliding_window", 4096)
    config = {**_MISTRAL, **config}
    return {**same_windows(config, _MISTRAL, window), **rope_keys(config, rope_of(config, theta=10000.0))}


def same_windows(config: Config, defaults: Config, window: int | None) -> dict[str, Any]:
    """Returns the NeoX configuration keys for a model like LLaMA whose layers all have the same sliding
    window.

    window: HuggingFace's width, which counts the token itself; None: there is no window. defaults: the
        family's values for fields that config.json leaves out."""
    keys = common_keys({**config, "attention_bias": False, "mlp_bias": False}, defaults)
    return {**keys, **same_window_keys(window)}


def _mistral_config(args: ModelArgs) -> dict[str, Any]:
    return {**drop_fields(llama_config(args), "attention_bias"), "sliding_window": window_of(args)}


MISTRAL = Family("mistral", "MistralForCausalLM", ROWS, _mistral_keys, _mistral_config, title="Mistral")

_MIXTRAL = {**_MISTRAL, "rms_norm_eps": 1e-5, "num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}


def _mixtral_keys(config: Config) -> dict[str, Any]:
    config = {**_MIXTRAL, "num_experts": None, **config}
    refuse_unless(
        config, "router_jitter_noise", 0.0
    )  # transformers also jitters the input of experts, we only the router's
    return {
        **same_windows(config, _MIXTRAL, config.get("sliding_window")),
        **rope_keys(config, rope_of(config, theta=1000000.0)),
        **expert_keys({**config, "norm_topk_prob": True}, _MIXTRAL),
    }


def _mixtral_config(args: ModelArgs) -> dict[str, Any]:
    experts = drop_fields(
        expert_config(args, "num_local_experts"), "norm_topk_prob"
    )  # Mixtral always normalizes, and has no field for it
    return {**_mistral_config(args), **experts, "intermediate_size": args.expert_ffn_size}


MIXTRAL = Family(
    "mixtral", "MixtralForCausalLM", MIXTRAL_ROWS, _mixtral_keys, _mixtral_config, title="Mixtral",
    in_memory=MIXTRAL_IN_MEMORY,
)  # fmt: skip


_MINISTRAL = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "max_position_embeddings": 131072,
}  # fmt: skip


def _ministral_keys(config: Config) -> dict[str, Any]:
    config = {**_MINISTRAL, **config, "attention_bias": False, "mlp_bias": False}
    windowed = config.get("sliding_window", 4096) is not None
    kinds = layer_kinds(config, lambda i: windowed)
    return {**llama_keys(config, _MINISTRAL), **window_keys(needed_window(config, 4096, kinds), kinds)}


def _ministral_config(args: ModelArgs) -> dict[str, Any]:
    return {**_mistral_config(args), "layer_types": layer_types(args)}


MINISTRAL = Family(
    "ministral", "MinistralForCausalLM", ROWS, _ministral_keys, _ministral_config, title="Ministral (2024)",
    notes="config.json sets: sliding windows in some layers",
)  # fmt: skip

_MINISTRAL3 = {
    **LLAMA_DEFAULTS, "hidden_size": 4096, "num_hidden_layers": 34, "intermediate_size": 14336,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _ministral3_keys(config: Config) -> dict[str, Any]:
    config = {**_MINISTRAL3, **config}
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config["rope_parameters"] = _YARN
    rope = rope_of(config, theta=10000.0)
    if rope.get("llama_4_scaling_beta") is None:
        raise CheckpointError("config.json: rope_parameters.llama_4_scaling_beta is missing, but ministral3 needs it")
    windows = same_windows(config, _MINISTRAL3, config.get("sliding_window"))
    return {**windows, **rope_keys(config, rope, query_scale=True)}


def _ministral3_config(args: ModelArgs) -> dict[str, Any]:
    config = _mistral_config(args)
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling") or {"rope_type": "default"}
    return {**config, "rope_parameters": {**scaling, "rope_theta": theta}}


MINISTRAL3 = Family(
    "ministral3", "Ministral3ForCausalLM", ROWS, _ministral3_keys, _ministral3_config, title="Ministral 3"
)
