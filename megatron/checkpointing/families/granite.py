"""Describes the Granite 3 family: LLaMA's blocks with four factors.

The factors scale embeddings, attention logits, the outputs of attention and MLP, and logits.
"""

from typing import Any

from megatron.checkpointing.families.config_fields import get, number
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import LLAMA_DEFAULTS, ROWS, llama_config, llama_keys
from megatron.model.build_specs import attention_scale
from megatron.neox_arguments import ModelArgs


def _keys(config: Config) -> dict[str, Any]:
    factors = ("attention_multiplier", "embedding_multiplier", "residual_multiplier")
    return {
        **llama_keys(config, LLAMA_DEFAULTS),
        **{name: get(config, name, 1.0) for name in factors},
        "logit_scale": 1 / get(config, "logits_scaling", 1.0),
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **llama_config(args),
        "mlp_bias": args.use_bias_in_mlp,
        "attention_multiplier": attention_scale(args) or args.head_dim**-0.5,
        "embedding_multiplier": args.embedding_multiplier,
        "residual_multiplier": args.residual_multiplier,
        "logits_scaling": number(float(f"{1 / args.logit_scale:.12g}")),  # 1 / (1 / 49) is not 49
    }


GRANITE = Family(
    "granite", "GraniteForCausalLM", ROWS, _keys, _config, title="Granite 3", has_scorer=False,
    notes="factors for embeddings, attention logits, block outputs and logits; config.json sets: biases",
)  # fmt: skip
