"""Describes the family Solar Open: GLM 4.5's experts in every block."""

from typing import Any

from megatron.checkpointing.families.config_fields import drop_fields, get, rope_keys, rope_of
from megatron.checkpointing.families.deepseek import (
    SPARSE,
    grouped_expert_config,
    grouped_expert_keys,
    sigmoid_keys,
    with_defaults,
)
from megatron.checkpointing.families.experts import DEEPSEEK_ROWS, EXPERTS_IN_MEMORY
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import common_keys, llama_config, replaced_rows
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "moe_intermediate_size": 1280, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def _keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _DEFAULTS)
    fields = {**config, "intermediate_size": config["moe_intermediate_size"], "attention_bias": False}
    return {
        **common_keys({**fields, "mlp_bias": False}, config),
        **rope_keys(config, rope_of(config, theta=1000000.0), partial=True),
        "add_qkv_bias": get(config, "attention_bias", False),  # the output projection never has a bias
        **grouped_expert_keys(config, [SPARSE] * config["num_hidden_layers"]),
        **sigmoid_keys(config),
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **drop_fields(llama_config(args, partial=args.rotary_pct != 1.0), "intermediate_size"),
        **grouped_expert_config(args),
        "attention_bias": args.add_qkv_bias,
        "norm_topk_prob": args.norm_topk_prob,
    }


SOLAR_OPEN = Family(
    "solar_open", "SolarOpenForCausalLM", replaced_rows(*DEEPSEEK_ROWS), _keys, _config, title="Solar Open",
    in_memory=EXPERTS_IN_MEMORY, has_scorer=False, notes="config.json sets: QKV biases, partial rotary, YaRN",
)  # fmt: skip
