"""The families of Qwen 2, 2.5 and 3: windows in the upper layers."""

from typing import Any

from megatron.checkpointing.families.config_fields import (
    FULL,
    SLIDING,
    get,
    layer_types,
    rope_config,
    rope_keys,
    rope_of,
    window_keys,
    window_of,
)
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import LLAMA_DEFAULTS, PER_HEAD, ROWS, common_config, common_keys
from megatron.neox_arguments import NeoXArgs

_DEFAULTS = {
    **LLAMA_DEFAULTS, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip


def _keys(config: Config, defaults: Config) -> dict[str, Any]:
    config = {**defaults, **config}
    full = get(config, "max_window_layers", 28)
    kinds = [SLIDING if i >= full else FULL for i in range(config["num_hidden_layers"])]
    window = get(config, "sliding_window", 4096) if get(config, "use_sliding_window", False) else None
    return {
        **common_keys({**config, "mlp_bias": False}, defaults),
        **rope_keys(config, rope_of(config, theta=10000.0)),
        **window_keys(window, get(config, "layer_types", kinds)),
    }


def _config(args: NeoXArgs) -> dict[str, Any]:
    types = layer_types(args)
    return {
        **common_config(args),
        **rope_config(args),
        "use_sliding_window": SLIDING in types,
        "sliding_window": window_of(args),
        "max_window_layers": types.index(SLIDING) if SLIDING in types else args.num_layers,
        "layer_types": types,
    }


def _qwen2_keys(config: Config) -> dict[str, Any]:
    return {**_keys({**config, "attention_bias": False}, _DEFAULTS), "add_qkv_bias": True}


def _qwen2_config(args: NeoXArgs) -> dict[str, Any]:
    config = _config(args)
    del config["attention_bias"]  # queries, keys and values always have them
    return config


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    ROWS,
    _qwen2_keys,
    _qwen2_config,
    title="Qwen 2, 2.5",
    notes="windows in upper layers, YaRN, tied head by config.json",
)


def _qwen3_keys(config: Config) -> dict[str, Any]:
    return {**_keys(config, {**_DEFAULTS, "head_dim": 128}), **PER_HEAD}


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", ROWS, _qwen3_keys, _config, title="Qwen 3")
