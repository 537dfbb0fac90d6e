"""Describes the family Helium: LLaMA's blocks, in which neighbouring dimensions rotate together."""

from typing import Any

from megatron.checkpointing.families.config_fields import get, refuse_unless
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import ROWS, llama_config, llama_keys
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 2560, "num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128,
    "intermediate_size": 7040, "max_position_embeddings": 4096, "rms_norm_eps": 1e-8,
}  # fmt: skip


def _keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, **config}
    # The output projection is square, so head_dim must be the usual one.
    refuse_unless(config, "head_dim", config["hidden_size"] // config["num_attention_heads"])
    return {
        **llama_keys({**config, "attention_bias": False}, _DEFAULTS, theta=100000.0),
        "rotary_interleaved": True,
        "add_qkv_bias": get(config, "attention_bias", False),  # the output projection never has a bias
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    return {**llama_config(args), "attention_bias": args.add_qkv_bias, "mlp_bias": args.use_bias_in_mlp}


HELIUM = Family(
    "helium", "HeliumForCausalLM", ROWS, _keys, _config, title="Helium 1", notes="config.json sets: biases",
)  # fmt: skip
