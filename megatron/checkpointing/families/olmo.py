"""Describes the families OLMo 1 to 3, OLMoE and FlexOlmo.

OLMo 1's norms have no weights. OLMo 2 and 3 have norms after attention and MLP, and over the full width of
queries and keys. OLMoE and FlexOlmo are mixtures of experts.
"""

from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import (
    FULL,
    SLIDING,
    drop_fields,
    layer_kinds,
    number,
    refuse_unless,
    rope_keys,
    rope_of,
    two_ropes_config,
    window_config,
    window_keys,
)
from megatron.checkpointing.families.experts import EXPERT_ROWS, EXPERTS_IN_MEMORY, expert_config, expert_keys
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import ROWS, common_config, common_keys, llama_config, llama_keys
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip
_NORMS = {"norm_placement": "olmo3", "use_qk_layernorm": True, "use_separate_qk_norms": True}


def _olmo2_keys(config: Config) -> dict[str, Any]:
    return {**llama_keys({**config, "mlp_bias": False}, _DEFAULTS), **_NORMS}


def local_rope_keys(rope: Config) -> dict[str, Any]:
    """Returns the NeoX key `rope_local_base_freq`, the rotary base of layers with a sliding window.

    rope: the rotary parameters of these layers. Raises CheckpointError if they have rotary scaling."""
    if rope["rope_type"] != "default":
        raise CheckpointError(
            f"config.json: rope_parameters.{SLIDING}.rope_type: {rope['rope_type']} is not supported, only default"
        )
    return {"rope_local_base_freq": float(number(rope["rope_theta"]))}


def _olmo3_keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, **config, "mlp_bias": False}
    windows = window_keys(config.get("sliding_window", 4096), layer_kinds(config, lambda i: (i + 1) % 4 != 0))
    rope, local = (rope_of(config, kind, theta=500000.0) for kind in (FULL, SLIDING))
    if config.get("rope_parameters") is None:
        local["rope_type"] = "default"  # `rope_scaling` applies only to layers with full attention
    return {
        **common_keys(config, _DEFAULTS),
        **rope_keys(config, rope),
        **windows,
        **(local_rope_keys(local) if windows else {}),
        **_NORMS,
    }


def _olmo3_config(args: ModelArgs) -> dict[str, Any]:
    rope = drop_fields(two_ropes_config(args), "rope_local_base_freq")  # OLMo 3 has no such key
    return {**common_config(args), **rope, **window_config(args)}


def _olmo1_keys(config: Config) -> dict[str, Any]:
    return {
        **drop_fields(llama_keys({**config, "mlp_bias": False}, _DEFAULTS), "rms_norm_epsilon"),
        "norm": "non_parametric_layernorm",
        "layernorm_epsilon": 1e-5,
        "clip_qkv": config.get("clip_qkv"),
    }


def _olmo1_config(args: ModelArgs) -> dict[str, Any]:
    return {**drop_fields(llama_config(args, head_dim=False), "rms_norm_eps"), "clip_qkv": args.clip_qkv}


OLMO1 = Family("olmo", "OlmoForCausalLM", ROWS, _olmo1_keys, _olmo1_config, title="OLMo 1", notes="clip_qkv")
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", ROWS, _olmo2_keys, llama_config, title="OLMo 2")
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", ROWS, _olmo3_keys, _olmo3_config, title="OLMo 3")

_OLMOE = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "intermediate_size": 2048,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.01,
}  # fmt: skip


def _olmoe_keys(config: Config) -> dict[str, Any]:
    experts = expert_keys(config, _OLMOE)
    config = {**_OLMOE, **config, "mlp_bias": False}
    # The size of the key norm's weight does not depend on head_dim, so head_dim must be the usual one.
    refuse_unless(config, "head_dim", config["hidden_size"] // config["num_attention_heads"])
    return {
        **llama_keys(config, _OLMOE),
        **experts,
        "use_qk_layernorm": True,
        "use_separate_qk_norms": True,
        "clip_qkv": config.get("clip_qkv"),
    }


def _olmoe_config(args: ModelArgs) -> dict[str, Any]:
    return {
        **llama_config(args, head_dim=False),
        **expert_config(args),
        "intermediate_size": args.expert_ffn_size,
        "clip_qkv": args.clip_qkv,
    }


OLMOE = Family(
    "olmoe", "OlmoeForCausalLM", EXPERT_ROWS, _olmoe_keys, _olmoe_config, title="OLMoE", notes="clip_qkv",
    has_scorer=False, in_memory=EXPERTS_IN_MEMORY,
)  # fmt: skip

_FLEX_OLMO = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "num_experts": 7, "num_experts_per_tok": 5, "router_aux_loss_coef": 0.01,
}  # fmt: skip


def _flex_olmo_keys(config: Config) -> dict[str, Any]:
    return {
        **llama_keys({**config, "mlp_bias": False}, _FLEX_OLMO, theta=500000.0),
        **expert_keys(config, _FLEX_OLMO),
        **_NORMS,
    }


def _flex_olmo_config(args: ModelArgs) -> dict[str, Any]:
    config = {**llama_config(args, head_dim=False), **expert_config(args)}
    return {**config, "intermediate_size": args.expert_ffn_size}


FLEX_OLMO = Family(
    "flex_olmo", "FlexOlmoForCausalLM", EXPERT_ROWS, _flex_olmo_keys, _flex_olmo_config, title="FlexOlmo",
    has_scorer=False, in_memory=EXPERTS_IN_MEMORY,
)  # fmt: skip
