"""Describes MiniCPM 3: latent attention, with factors of embeddings, block outputs and logits."""

import math
from typing import Any

from megatron.checkpointing.families.config_fields import number
from megatron.checkpointing.families.deepseek import LATENT_ROWS, latent_config, latent_keys, with_defaults
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import replaced_rows
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 2560, "num_hidden_layers": 62, "num_attention_heads": 40, "intermediate_size": 6400,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "kv_lora_rank": 256,
    "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": None, "scale_emb": 12,
    "scale_depth": 1.4, "dim_model_base": 256,
}  # fmt: skip


def _keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _DEFAULTS, "scale_depth", "dim_model_base")  # a null means: no such factor
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    depth, base = config["scale_depth"], config["dim_model_base"]
    value_dim = config["v_head_dim"] or hidden // config["num_attention_heads"]
    return {
        **latent_keys({**config, "v_head_dim": value_dim}, interleaved=False),
        "embedding_multiplier": float(config["scale_emb"]),
        "residual_multiplier": 1.0 if depth is None else depth / math.sqrt(layers),
        "logit_scale": 1.0 if base is None else base / hidden,
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    depth, base = args.residual_multiplier * math.sqrt(args.num_layers), args.logit_scale * args.hidden_size
    return {
        **latent_config(args),
        "mlp_bias": args.use_bias_in_mlp,
        "scale_emb": number(args.embedding_multiplier),
        "scale_depth": number(float(f"{depth:.12g}")),
        "dim_model_base": number(float(f"{base:.12g}")),
    }


MINICPM3 = Family(
    "minicpm3", "MiniCPM3ForCausalLM", replaced_rows(*LATENT_ROWS), _keys, _config, title="MiniCPM 3",
    notes="factors for embeddings, block outputs and logits; config.json sets: LongRoPE, biases",
)  # fmt: skip
