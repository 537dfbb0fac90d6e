"""Describes EXAONE 4: norms after attention and MLP, and layers with a window or without positions."""

from collections.abc import Sequence
from typing import Any

from megatron.checkpointing.families.config_fields import (
    SLIDING,
    drop_fields,
    layer_kinds,
    layer_types,
    needed_window,
    window_keys,
    window_of,
    window_period,
)
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import PER_HEAD, ROWS, llama_config, llama_keys
from megatron.neox_arguments import ModelArgs

_EXAONE4 = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 16384, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip


def _kinds(config: Config) -> Sequence[str]:
    """Returns the kind of each layer's attention."""
    if config.get("sliding_window", 4096) is None:
        return layer_kinds(config, lambda i: False)
    period = window_period(config, 4)
    return layer_kinds(config, lambda i: (i + 1) % period != 0)


def attention_keys(config: Config, defaults: Config) -> dict[str, Any]:
    """Returns the NeoX configuration keys for EXAONE's attention; layers without a window have no positions.

    defaults: the family's values for fields that config.json leaves out."""
    config = {**defaults, **config, "attention_bias": False, "mlp_bias": False}
    kinds = _kinds(config)
    window = needed_window(config, 4096, kinds)
    return {
        **llama_keys(config, defaults),
        **PER_HEAD,
        **window_keys(window, kinds),
        **({} if window is None else {"no_rope_layers": [int(kind == SLIDING) for kind in kinds]}),
    }


def attention_config(args: ModelArgs) -> dict[str, Any]:
    """Returns config.json's fields for EXAONE's attention, the inverse of `attention_keys`."""
    return {
        **drop_fields(llama_config(args), "attention_bias"),
        "sliding_window": window_of(args),
        "layer_types": layer_types(args),
    }


def _keys(config: Config) -> dict[str, Any]:
    return {**attention_keys(config, _EXAONE4), "norm_placement": "olmo3"}


EXAONE4 = Family(
    "exaone4", "Exaone4ForCausalLM", ROWS, _keys, attention_config, title="EXAONE 4",
    notes="config.json sets: sliding windows; with them, layers without a window have no positions",
)  # fmt: skip
