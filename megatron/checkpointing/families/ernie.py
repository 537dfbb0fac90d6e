"""Describes ERNIE 4.5: LLaMA's blocks, in which neighbouring dimensions rotate together."""

from typing import Any

from megatron.checkpointing.families.config_fields import drop_fields, get
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import ROWS, llama_config, llama_keys
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 1024, "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 3072, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def _keys(config: Config) -> dict[str, Any]:
    biases = get(config, "use_bias", False)
    config = {**config, "attention_bias": biases, "mlp_bias": biases}
    return {**llama_keys(config, _DEFAULTS, theta=500000.0), "rotary_interleaved": True}


def _config(args: ModelArgs) -> dict[str, Any]:
    return {**drop_fields(llama_config(args), "attention_bias"), "use_bias": args.use_bias_in_mlp}


ERNIE4_5 = Family(
    "ernie4_5", "Ernie4_5ForCausalLM", ROWS, _keys, _config, title="ERNIE 4.5", has_scorer=False,
    notes="config.json sets: biases",
)  # fmt: skip
