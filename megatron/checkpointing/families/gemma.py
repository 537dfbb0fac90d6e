"""Describes the families Gemma 1 to 3 (text).

Norms multiply by 1 + w, and embeddings are scaled. Gemma 2 and 3 also have norms after attention and MLP.
Gemma 2 caps logits, Gemma 3 has two rotary bases.
"""

from typing import Any

from megatron.checkpointing.errors import CheckpointError
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
    window_period,
)
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import PER_HEAD, ROWS, common_config, common_keys, llama_config, llama_keys
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
    if config.get("attn_logit_softcapping") is not None:  # transformers has the field, but applies no cap
        cap = config["attn_logit_softcapping"]
        raise CheckpointError(f"config.json: attn_logit_softcapping: {cap} is not supported in Gemma 3, only null")
    period = window_period(config, 6, "sliding_window_pattern", "_sliding_window_pattern")
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

_GEMMA1 = {
    "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
    "head_dim": 256, "intermediate_size": 24576, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
_TANH = "gelu_pytorch_tanh"


def _gemma1_keys(config: Config) -> dict[str, Any]:
    config = {**_GEMMA1, **config}
    refuse_unless(config, "use_bidirectional_attention", False)
    act = get(config, "hidden_act", _TANH)
    act = _TANH if act == "gelu" else act  # the published gelu means the tanh approximation
    return {
        **llama_keys({**config, "hidden_act": act, "mlp_bias": False}, _GEMMA1),
        "zero_centered_gamma": True,
        "embedding_multiplier": config["hidden_size"] ** 0.5,
    }


def _gemma1_config(args: ModelArgs) -> dict[str, Any]:
    return {**llama_config(args), "hidden_act": gated_activation(args, _TANH)}


GEMMA = Family("gemma", "GemmaForCausalLM", ROWS, _gemma1_keys, _gemma1_config, title="Gemma 1")
