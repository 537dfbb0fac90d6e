"""Describes the Seed-OSS family: LLaMA's blocks with biases of queries, keys and values."""

from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import get
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import ROWS, llama_config, llama_keys
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 4096, "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 27648, "max_position_embeddings": 524288,
}  # fmt: skip


def _keys(config: Config) -> dict[str, Any]:
    inner, outer = get(config, "attention_bias", True), get(config, "attention_out_bias", False)
    if outer and not inner:
        raise CheckpointError("config.json: attention_out_bias: true is supported only with attention_bias: true")
    return {**llama_keys({**config, "attention_bias": outer}, _DEFAULTS), "add_qkv_bias": inner and not outer}


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **llama_config(args),
        "attention_bias": args.use_bias_in_attn_linear or args.add_qkv_bias,
        "attention_out_bias": args.use_bias_in_attn_linear,
        "mlp_bias": args.use_bias_in_mlp,
    }


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", ROWS, _keys, _config, title="Seed-OSS")
