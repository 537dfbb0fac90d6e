"""The family of Granite 3: LLaMA's blocks with four factors.

They scale embeddings, attention logits, what blocks add to the residual stream, and logits.
"""

from typing import Any

from megatron.checkpointing.families.config_fields import get, number, rope_config, rope_keys, rope_of
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import LLAMA_DEFAULTS, ROWS, common_config, common_keys
from megatron.model.specs import attention_scale
from megatron.neox_arguments import NeoXArgs


def _keys(config: Config) -> dict[str, Any]:
    config = {**LLAMA_DEFAULTS, **config}
    return {
        **common_keys(config, LLAMA_DEFAULTS),
        **rope_keys(config, rope_of(config, theta=10000.0)),
        "attention_multiplier": get(config, "attention_multiplier", 1.0),
        "embedding_multiplier": get(config, "embedding_multiplier", 1.0),
        "residual_multiplier": get(config, "residual_multiplier", 1.0),
        "logit_scale": 1 / get(config, "logits_scaling", 1.0),
    }


def _config(args: NeoXArgs) -> dict[str, Any]:
    return {
        **common_config(args),
        **rope_config(args),
        "mlp_bias": args.use_bias_in_mlp,
        "attention_multiplier": attention_scale(args) or args.head_dim**-0.5,
        "embedding_multiplier": args.embedding_multiplier,
        "residual_multiplier": args.residual_multiplier,
        "logits_scaling": number(float(f"{1 / args.logit_scale:.12g}")),  # 1 / (1 / 49) is not 49
    }


GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    ROWS,
    _keys,
    _config,
    title="Granite 3",
    has_scorer=False,
    notes="factors for embeddings, attention logits, block outputs and logits; config.json sets: biases",
)
