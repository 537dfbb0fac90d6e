"""The family of Gemma 3 for text: norms around attention and MLP that multiply by 1 + w, scaled embeddings,
two rotary bases."""

from typing import Any

from megatron.checkpointing.families.config_fields import (
    FULL,
    GATES,
    SLIDING,
    first_name,
    get,
    layer_types,
    number,
    refuse_unless,
    rope_keys,
    rope_of,
    two_ropes_config,
    window_keys,
    window_of,
)
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import PER_HEAD, ROWS, common_config, common_keys
from megatron.checkpointing.families.olmo import local_rope_keys
from megatron.neox_arguments import NeoXArgs

_DEFAULTS = {
    "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "intermediate_size": 9216, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


def _keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, **config, "mlp_bias": False}
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        refuse_unless(config, name, False)
    every = get(config, "sliding_window_pattern", get(config, "_sliding_window_pattern", 6))
    kinds = [FULL if (i + 1) % every == 0 else SLIDING for i in range(config["num_hidden_layers"])]
    windows = window_keys(config.get("sliding_window", 4096), get(config, "layer_types", kinds))
    local = rope_of({**config, "rope_scaling": None}, SLIDING, theta=10000.0, spelt="rope_local_base_freq")
    return {
        **common_keys(config, _DEFAULTS, "hidden_activation"),
        **rope_keys(config, rope_of(config, FULL, theta=1000000.0)),
        **windows,
        **(local_rope_keys(local) if windows else {}),
        "norm_placement": "sandwich",
        "zero_centered_gamma": True,
        **PER_HEAD,
        "query_pre_attn_scalar": number(get(config, "query_pre_attn_scalar", 256)),
        "embedding_multiplier": config["hidden_size"] ** 0.5,
    }


def _config(args: NeoXArgs) -> dict[str, Any]:
    config = {**common_config(args), **two_ropes_config(args)}
    del config["hidden_act"]
    return {
        **config,
        "hidden_activation": first_name(GATES, args.activation) or "gelu_pytorch_tanh",
        "query_pre_attn_scalar": number(args.query_pre_attn_scalar or args.head_dim),
        "sliding_window": window_of(args) or 4096,  # must stand there even where no layer has one
        "layer_types": layer_types(args),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", ROWS, _keys, _config, scorer="Gemma3TextForSequenceClassification")
