"""Describes the families Qwen 2, 2.5 and 3, with sliding windows in upper layers, and Qwen's mixtures of
experts.
"""

from typing import Any

from megatron.checkpointing.families.config_fields import (
    SLIDING,
    drop_fields,
    get,
    layer_kinds,
    layer_types,
    same_window_keys,
    window_keys,
    window_of,
)
from megatron.checkpointing.families.experts import EXPERT_ROWS, EXPERTS_IN_MEMORY, expert_config, expert_keys
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import LLAMA_DEFAULTS, PER_HEAD, ROWS, llama_config, llama_keys
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    **LLAMA_DEFAULTS, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip


def _window(config: Config) -> int | None:
    return get(config, "sliding_window", 4096) if get(config, "use_sliding_window", False) else None


def _keys(config: Config, defaults: Config) -> dict[str, Any]:
    full = get(config, "max_window_layers", 28)
    return {
        **llama_keys({**config, "mlp_bias": False}, defaults),
        **window_keys(_window(config), layer_kinds({**defaults, **config}, lambda i: i >= full)),
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    types = layer_types(args)
    return {
        **llama_config(args),
        "use_sliding_window": SLIDING in types,
        "sliding_window": window_of(args),
        "max_window_layers": types.index(SLIDING) if SLIDING in types else args.num_layers,
        "layer_types": types,
    }


def _qwen2_keys(config: Config) -> dict[str, Any]:
    return {**_keys({**config, "attention_bias": False}, _DEFAULTS), "add_qkv_bias": True}


def _qwen2_config(args: ModelArgs) -> dict[str, Any]:
    return drop_fields(_config(args), "attention_bias")  # in Qwen 2, queries, keys and values always have biases


QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", ROWS, _qwen2_keys, _qwen2_config, title="Qwen 2, 2.5",
    notes="config.json sets: sliding windows in upper layers, YaRN, tied head",
)  # fmt: skip


def _qwen3_keys(config: Config) -> dict[str, Any]:
    return {**_keys(config, {**_DEFAULTS, "head_dim": 128}), **PER_HEAD}


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", ROWS, _qwen3_keys, _config, title="Qwen 3")

_QWEN2_MOE = {
    "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 5632, "max_position_embeddings": 32768, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
_QWEN3_MOE = {
    "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
    "intermediate_size": 6144, "max_position_embeddings": 32768, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001,
}  # fmt: skip


def blocks_with_experts(config: Config) -> dict[str, Any]:
    """Returns the NeoX configuration key that says which blocks have experts; {} if all have.

    Every `decoder_sparse_step`th block has experts, except blocks listed in `mlp_only_layers`."""
    step, dense = get(config, "decoder_sparse_step", 1), get(config, "mlp_only_layers", ())
    with_experts = [int((i + 1) % step == 0 and i not in dense) for i in range(config["num_hidden_layers"])]
    return {} if all(with_experts) else {"moe_layer_freq": with_experts}


def _moe_keys(config: Config, defaults: Config) -> dict[str, Any]:
    """Returns the NeoX configuration keys for a Qwen model with experts, except those of windows and
    biases."""
    return {
        **llama_keys({**config, "mlp_bias": False}, defaults),
        **expert_keys(config, defaults),
        "moe_intermediate_size": get(config, "moe_intermediate_size", defaults["moe_intermediate_size"]),
        **blocks_with_experts({**defaults, **config}),
    }


def _moe_config(args: ModelArgs) -> dict[str, Any]:
    return {
        **llama_config(args, head_dim=False),
        **expert_config(args),
        "moe_intermediate_size": args.expert_ffn_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [block for block in range(args.num_layers) if not args.has_experts(block)],
        "use_sliding_window": SLIDING in layer_types(args),
        "sliding_window": window_of(args),
    }


def _qwen2_moe_keys(config: Config) -> dict[str, Any]:
    num_window_layers = get(config, "max_window_layers", 28)
    kinds = layer_kinds({**_QWEN2_MOE, **config}, lambda i: i % 2 == 0 and i < num_window_layers)
    shared = "shared_expert_intermediate_size"
    return {
        **_moe_keys({**config, "attention_bias": False}, _QWEN2_MOE),
        **window_keys(_window(config), kinds),
        "add_qkv_bias": get(config, "qkv_bias", True),
        f"moe_{shared}": get(config, shared, _QWEN2_MOE[shared]),
        "moe_shared_expert_gate": True,
    }


def _qwen2_moe_config(args: ModelArgs) -> dict[str, Any]:
    return {
        **drop_fields(_moe_config(args), "attention_bias"),  # the output projection never has a bias
        "max_window_layers": args.num_layers,
        "layer_types": layer_types(args),
        "qkv_bias": args.add_qkv_bias,
        "shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
    }


QWEN2_MOE = Family(
    "qwen2_moe", "Qwen2MoeForCausalLM", EXPERT_ROWS, _qwen2_moe_keys, _qwen2_moe_config, title="Qwen 1.5 and 2 MoE",
    in_memory=EXPERTS_IN_MEMORY, notes="config.json sets: dense blocks, sliding windows in some layers",
)  # fmt: skip


def _qwen3_moe_keys(config: Config) -> dict[str, Any]:
    return {**_moe_keys(config, _QWEN3_MOE), **same_window_keys(_window(config)), **PER_HEAD}


QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", EXPERT_ROWS, _qwen3_moe_keys, _moe_config, title="Qwen 3 MoE",
    in_memory=EXPERTS_IN_MEMORY, notes="config.json sets: dense blocks, sliding windows",
)  # fmt: skip
