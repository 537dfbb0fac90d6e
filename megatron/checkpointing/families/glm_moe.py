"""Describes GLM 4.5 and its kin, with DeepSeek V3's router: the usual attention, or latent attention."""

from typing import Any

from megatron.checkpointing.families.config_fields import get, refuse_unless, rope_keys, rope_of
from megatron.checkpointing.families.deepseek import (
    DENSE,
    LATENT_ROWS,
    SPARSE,
    first_dense,
    first_dense_config,
    grouped_expert_config,
    grouped_expert_keys,
    latent_config,
    latent_keys,
    rotates_neighbours,
    sigmoid_keys,
    with_defaults,
)
from megatron.checkpointing.families.experts import DEEPSEEK_ROWS, EXPERTS_IN_MEMORY
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.llama import PER_HEAD, common_keys, llama_config, replaced_rows
from megatron.neox_arguments import ModelArgs

_EXPERTS = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "rms_norm_eps": 1e-5}
_GLM4_MOE = {
    **_EXPERTS, "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
    "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
_LITE = {
    **_EXPERTS, "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20, "intermediate_size": 10240,
    "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_routed_experts": 64,
    "routed_scaling_factor": 1.8, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "qk_nope_head_dim": 192, "num_experts_per_tok": 4,
}  # fmt: skip


def _keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _GLM4_MOE)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    # The sizes in transformers' defaults have no whole head_dim; the published models' is 128.
    head_dim = get(config, "head_dim", 128 if hidden % heads else hidden // heads)
    return {
        **common_keys({**config, "head_dim": head_dim, "attention_bias": False, "mlp_bias": False}, config),
        **rope_keys(config, rope_of(config, theta=10000.0), partial=True),
        **(PER_HEAD if get(config, "use_qk_norm", False) else {}),
        "add_qkv_bias": get(config, "attention_bias", False),  # the output projection never has a bias
        **grouped_expert_keys(config, first_dense(config)),
        **sigmoid_keys(config),
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **llama_config(args, partial=True),
        "attention_bias": args.add_qkv_bias,
        "use_qk_norm": args.use_qk_layernorm,
        **grouped_expert_config(args),
        **first_dense_config(args),
        "norm_topk_prob": args.norm_topk_prob,
        "num_nextn_predict_layers": args.mtp_num_layers or 0,
    }


GLM4_MOE = Family(
    "glm4_moe", "Glm4MoeForCausalLM", replaced_rows(*DEEPSEEK_ROWS), _keys, _config, title="GLM 4.5, 4.6, 4.7",
    in_memory=EXPERTS_IN_MEMORY, predicts_more=True, has_scorer=False,
    notes="config.json sets: dense blocks at the start, QK norms, biases; layers for multi-token prediction are read "
    "and written with mtp_num_layers",
)  # fmt: skip


def _lite_keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _LITE)
    refuse_unless(config, "partial_rotary_factor", 1.0)
    usual_kinds = [DENSE] + [SPARSE] * (config["num_hidden_layers"] - 1)
    return {
        **latent_keys({**config, "mlp_bias": False}, interleaved=rotates_neighbours(config)),
        **grouped_expert_keys(config, get(config, "mlp_layer_types", usual_kinds)),
        **sigmoid_keys(config),
    }


def _lite_config(args: ModelArgs) -> dict[str, Any]:
    return {
        **latent_config(args),
        **grouped_expert_config(args),
        "mlp_layer_types": [SPARSE if args.has_experts(block) else DENSE for block in range(args.num_layers)],
        "norm_topk_prob": args.norm_topk_prob,
        "rope_interleave": args.rotary_interleaved,
        "num_nextn_predict_layers": args.mtp_num_layers or 0,
    }


GLM4_MOE_LITE = Family(
    "glm4_moe_lite", "Glm4MoeLiteForCausalLM", replaced_rows(*LATENT_ROWS, *DEEPSEEK_ROWS), _lite_keys, _lite_config,
    title="GLM 4.7 Flash", in_memory=EXPERTS_IN_MEMORY, predicts_more=True, has_scorer=False,
    notes="config.json sets: dense blocks; layers for multi-token prediction are read and written with "
    "mtp_num_layers",
)  # fmt: skip
