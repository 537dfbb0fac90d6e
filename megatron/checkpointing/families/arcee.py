"""Describes the family Arcee: LLaMA's blocks with an ungated MLP (relu2)."""

from typing import Any

from megatron.checkpointing.families.config_fields import plain_activation, plain_activation_keys
from megatron.checkpointing.families.family import Config, Family, weight_and_bias
from megatron.checkpointing.families.llama import llama_config, llama_keys, replaced_rows
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 18432,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
# For models built like LLaMA, but without a gate.
UNGATED_ROWS = replaced_rows(*weight_and_bias("mlp.linear1", "model.layers.{}.mlp.up_proj"))


def _keys(config: Config) -> dict[str, Any]:
    keys = llama_keys({**config, "hidden_act": "silu"}, _DEFAULTS)
    return {**keys, **plain_activation_keys(config, "hidden_act", "relu2")}


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **llama_config(args),
        "hidden_act": plain_activation(args, "relu2"),
        "mlp_bias": args.use_bias_in_mlp,
    }


ARCEE = Family(
    "arcee", "ArceeForCausalLM", UNGATED_ROWS, _keys, _config, title="Arcee (AFM)",
    notes="config.json sets: grouped queries, biases, YaRN",
)  # fmt: skip
