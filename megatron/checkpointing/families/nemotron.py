"""Describes the dense family Nemotron (Minitron): LayerNorm with 1 + w, and an ungated MLP (relu2)."""

from typing import Any

from megatron.checkpointing.families.config_fields import (
    drop_fields,
    get,
    plain_activation,
    plain_activation_keys,
    rope_keys,
    rope_of,
)
from megatron.checkpointing.families.family import Config, Family, weight_and_bias
from megatron.checkpointing.families.llama import common_keys, llama_config, replaced_rows
from megatron.checkpointing.families.starcoder import LAYERNORM_ROWS
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 48, "intermediate_size": 24576,
    "max_position_embeddings": 4096,
}  # fmt: skip
_ROWS = replaced_rows(*LAYERNORM_ROWS, *weight_and_bias("mlp.linear1", "model.layers.{}.mlp.up_proj"))


def _keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, "partial_rotary_factor": 0.5, **config}
    return {
        **drop_fields(common_keys({**config, "hidden_act": "silu"}, config), "rms_norm_epsilon"),
        **rope_keys(config, rope_of(config, theta=10000.0), partial=True),
        **plain_activation_keys(config, "hidden_act", "relu2"),
        "norm": "layernorm",
        "zero_centered_gamma": True,
        "layernorm_epsilon": get(config, "norm_eps", 1e-5),
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **drop_fields(llama_config(args, partial=True), "rms_norm_eps"),
        "hidden_act": plain_activation(args, "relu2"),
        "norm_eps": args.layernorm_epsilon,
        "mlp_bias": args.use_bias_in_mlp,
    }


NEMOTRON = Family(
    "nemotron", "NemotronForCausalLM", _ROWS, _keys, _config, title="Nemotron 4, Minitron",
    notes="config.json sets: grouped queries, partial rotary, biases",
)  # fmt: skip
