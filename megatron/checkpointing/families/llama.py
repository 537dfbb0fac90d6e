"""Describes the families LLaMA (1 to 3) and SmolLM 3, and serves all families built like LLaMA."""

from typing import Any

from megatron.checkpointing.families.config_fields import (
    FULL,
    SLIDING,
    activation_keys,
    gated_activation,
    get,
    layer_types,
    refuse_unless,
    rope_config,
    rope_keys,
    rope_of,
    size_config,
    size_keys,
    window_keys,
    window_of,
)
from megatron.checkpointing.families.family import QKV, UP_GATE, Config, Family, TensorMapping, weight_and_bias
from megatron.neox_arguments import ModelArgs

_BLOCK = "model.layers.{}."
_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_ATTENTION = tuple(f"{_BLOCK}self_attn.{name}_proj" for name in "qkv")
# For all models built like LLaMA. The configuration determines which norms and biases exist.
ROWS = (
    TensorMapping("word_embeddings.weight", ("model.embed_tokens.weight",)),
    *(TensorMapping(f"{norm}.scale", (f"{_BLOCK}{norm}.weight",)) for norm in _NORMS),
    TensorMapping("attention.q_norm.scale", (_BLOCK + "self_attn.q_norm.weight",)),
    TensorMapping("attention.k_norm.scale", (_BLOCK + "self_attn.k_norm.weight",)),
    *weight_and_bias("attention.query_key_value", *_ATTENTION, transform=QKV),
    *weight_and_bias("attention.dense", _BLOCK + "self_attn.o_proj"),
    *weight_and_bias("mlp.linear1", _BLOCK + "mlp.up_proj", _BLOCK + "mlp.gate_proj", transform=UP_GATE),
    *weight_and_bias("mlp.linear2", _BLOCK + "mlp.down_proj"),
    TensorMapping("norm.scale", ("model.norm.weight",)),
    TensorMapping("final_linear.weight", ("lm_head.weight",)),
)


def replaced_rows(*replacements: TensorMapping) -> tuple[TensorMapping, ...]:
    """Returns LLaMA's tensor mappings `ROWS`; `replacements` replace the rows of the same parameters."""
    return tuple({row.neox_name: row for row in (*ROWS, *replacements)}.values())


PER_HEAD = {"use_qk_layernorm": True, "use_separate_qk_norms": True, "qk_norm_per_head": True}


def common_keys(config: Config, defaults: Config, act: str = "hidden_act") -> dict[str, Any]:
    """Returns the NeoX configuration keys for a model built like LLaMA, without positions and windows.

    config: config.json. If its num_key_value_heads is null, each query head has its own; if its head_dim is
        null, it is hidden_size / heads.
    defaults: the family's values for fields that config.json leaves out.
    act: the field of config.json that names the activation."""
    config = {**defaults, **config}
    refuse_unless(config, "rope_interleaved", False)
    keys, head_dim = size_keys(config, defaults), config.get("head_dim")
    heads = keys["num_attention_heads"]
    return {
        **keys,
        **activation_keys(config, act, defaults.get(act, "silu")),
        "num_kv_heads": get(config, "num_key_value_heads", heads),
        **({} if head_dim in (None, keys["hidden_size"] / heads) else {"head_dim": head_dim}),
        "norm": "rmsnorm",
        "rms_norm_epsilon": get(config, "rms_norm_eps", defaults.get("rms_norm_eps", 1e-6)),
        "use_bias_in_attn_linear": get(config, "attention_bias", False),
        "use_bias_in_mlp": get(config, "mlp_bias", False),
    }


def llama_keys(config: Config, defaults: Config, theta: float = 10000.0) -> dict[str, Any]:
    """Returns the NeoX configuration keys for a model built like LLaMA, without windows.

    defaults: the family's values for fields that config.json leaves out. theta: the rotary base if
        config.json gives none."""
    return {**common_keys(config, defaults), **rope_keys({**defaults, **config}, rope_of(config, theta=theta))}


def common_config(args: ModelArgs, *, head_dim: bool = True) -> dict[str, Any]:
    """Returns config.json's fields for a model built like LLaMA, the inverse of `common_keys`.

    head_dim: always write the field `head_dim`; false: only if it differs from hidden_size / heads."""
    usual = args.head_dim * args.num_attention_heads == args.hidden_size
    return {
        **size_config(args),
        "num_key_value_heads": args.kv_heads,
        **({"head_dim": args.head_dim} if head_dim or not usual else {}),
        "hidden_act": gated_activation(args),
        "rms_norm_eps": args.rms_norm_epsilon,
        "attention_bias": args.use_bias_in_attn_linear,
    }


def llama_config(args: ModelArgs, *, head_dim: bool = True, partial: bool = False) -> dict[str, Any]:
    """Returns config.json's fields for a model built like LLaMA, including rotary positions.

    head_dim: always write the field `head_dim`; false: only if it differs from hidden_size / heads. partial:
        write `partial_rotary_factor`."""
    return {**common_config(args, head_dim=head_dim), **rope_config(args, partial=partial)}


LLAMA_DEFAULTS = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
    "max_position_embeddings": 2048,
}  # fmt: skip


def _llama_keys(config: Config) -> dict[str, Any]:
    return llama_keys(config, LLAMA_DEFAULTS)


def _llama_config(args: ModelArgs) -> dict[str, Any]:
    return {**llama_config(args), "mlp_bias": args.use_bias_in_mlp}


LLAMA = Family(
    "llama", "LlamaForCausalLM", ROWS, _llama_keys, _llama_config, title="Llama 1 to 3",
    notes="config.json sets: grouped queries, biases, linear, dynamic, yarn and llama3 scaling",
)  # fmt: skip

_SMOLLM3 = {
    "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 11008, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip


def _smollm3_keys(config: Config) -> dict[str, Any]:
    config = {**_SMOLLM3, **config}
    layers, interval = config["num_hidden_layers"], get(config, "no_rope_layer_interval", 4)
    rotated = list(get(config, "no_rope_layers", [int((i + 1) % interval != 0) for i in range(layers)]))[:layers]
    slides = get(config, "use_sliding_window", False)
    kinds = [FULL if on else SLIDING for on in rotated]
    return {
        **llama_keys(config, _SMOLLM3, theta=2000000.0),
        **window_keys(config.get("sliding_window") if slides else None, get(config, "layer_types", kinds)),
        "no_rope_layers": rotated,
    }


def _smollm3_config(args: ModelArgs) -> dict[str, Any]:
    types = layer_types(args)
    return {
        **_llama_config(args),
        "no_rope_layers": list(args.no_rope_layers or (1,) * args.num_layers),
        "use_sliding_window": SLIDING in types,
        "sliding_window": window_of(args),
        "layer_types": types,
    }


SMOLLM3 = Family(
    "smollm3", "SmolLM3ForCausalLM", ROWS, _smollm3_keys, _smollm3_config, title="SmolLM 3",
    notes="config.json sets: sliding windows",
)  # fmt: skip
