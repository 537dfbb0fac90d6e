"""Describes the families Gemma 2 and Gemma 3 (text).

Norms before and after attention and MLP multiply by 1 + w. Embeddings are scaled. Gemma 2 caps logits, Gemma
3 has two rotary bases.
"""

from typing import Any

from megatron.checkpointing.families.config_fields import (
    FULL,
    SLIDING,
    drop_fields,
    gated_activation,
    get,
    layer_kinds,
    number,
    refuse_unless,
    rope_config,
    rope_keys,
    rope_of,
    two_ropes_config,
    window_config,
    window_keys,
)
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import PER_HEAD, ROWS, common_config, common_keys
from megatron.checkpointing.families.olmo import local_rope_keys
from megatron.neox_arguments import ModelArgs

_GEMMA3 = {
    "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "intermediate_size": 9216, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


def _common_keys(config: Config, defaults: Config) -> dict[str, Any]:
    """Returns the NeoX keys that Gemma 2 and Gemma 3 share, without positions and windows."""
    refuse_unless(config, "use_bidirectional_attention", False)
    return {
        **common_keys({**config, "mlp_bias": False}, defaults, "hidden_activation"),
        "norm_placement": "sandwich",
        "zero_centered_gamma": True,
        "query_pre_attn_scalar": number(get(config, "query_pre_attn_scalar", 256)),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "embedding_multiplier": config["hidden_size"] ** 0.5,
    }


def _common_config(args: ModelArgs) -> dict[str, Any]:
    """Returns config.json's fields for Gemma 2 and 3: the inverse of `_common_keys`, and the windows."""
    return {
        **drop_fields(common_config(args), "hidden_act"),
        "hidden_activation": gated_activation(args, "gelu_pytorch_tanh"),
        "query_pre_attn_scalar": number(args.query_pre_attn_scalar or args.head_dim),
        **window_config(args),
        "attn_logit_softcapping": args.attn_logit_softcapping,
        "final_logit_softcapping": args.final_logit_softcapping,
    }


_GEMMA2 = {
    **_GEMMA3, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip


def _gemma2_keys(config: Config) -> dict[str, Any]:
    config = {**_GEMMA2, **config}
    return {
        **_common_keys(config, _GEMMA2),
        **rope_keys(config, rope_of(config, theta=10000.0)),
        **window_keys(config.get("sliding_window", 4096), layer_kinds(config, lambda i: i % 2 == 0)),
    }


def _gemma2_config(args: ModelArgs) -> dict[str, Any]:
    return {**_common_config(args), **rope_config(args)}


GEMMA2 = Family(
    "gemma2", "Gemma2ForCausalLM", ROWS, _gemma2_keys, _gemma2_config, title="Gemma 2",
    notes="capped attention logits need attention_backend flex (GPUs), flash_attn or math",
)  # fmt: skip


def _gemma3_keys(config: Config) -> dict[str, Any]:
    config = {**_GEMMA3, **config}
    period = get(config, "sliding_window_pattern", get(config, "_sliding_window_pattern", 6))
    windows = window_keys(config.get("sliding_window", 4096), layer_kinds(config, lambda i: (i + 1) % period != 0))
    local = rope_of({**config, "rope_scaling": None}, SLIDING, theta=10000.0, spelt="rope_local_base_freq")
    return {
        **_common_keys(config, _GEMMA3),
        **rope_keys(config, rope_of(config, FULL, theta=1000000.0)),
        **windows,
        **(local_rope_keys(local) if windows else {}),
        **PER_HEAD,
    }


def _gemma3_config(args: ModelArgs) -> dict[str, Any]:
    return {**_common_config(args), **two_ropes_config(args)}


GEMMA3 = Family(
    "gemma3_text", "Gemma3ForCausalLM", ROWS, _gemma3_keys, _gemma3_config, title="Gemma 3",
    scorer="Gemma3TextForSequenceClassification",
)  # fmt: skip
